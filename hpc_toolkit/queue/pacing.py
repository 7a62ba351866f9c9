"""When a worker looks at the run: often if that is cheap, seldom if other hosts pay for it.

On a filesystem of this machine alone, looks cost only this machine's time and may use a twentieth
of it. On a shared filesystem, all workers of a run share a fixed number of metadata operations per
second, however many they are: each uses its part, at random times of its own. While new items may
be added, a worker that just ran out of them looks more often, since they often come soon.
"""

from __future__ import annotations

import math
import sys

from hpc_toolkit.system.clock import Clock

# Operations per second of all workers of a run on a shared filesystem; together below 100.
POLLS_PER_S = 20.0
"""Openings of ``head``, by one worker of each node."""
MATES_POLLS_PER_S = 5.0
"""Openings of ``head`` by the others, should they not hear what that worker sees."""
SCANS_PER_S = 30.0
"""Operations of scans for units to take over, by workers on and off duty together."""
LOOKS_PER_S = 25.0
"""Reads of files in ``workers/``, and tests of locks."""
LISTINGS_PER_S = 14.0
"""Listings of ``workers/`` and ``control/``."""
NAMES_EVERY = 8
"""One watch in this many lists ``workers/``, and every watch lists ``control/``."""

READINGS_PER_S = 20.0
"""Files per second that a process waiting for results reads, such as a campaign's coordinator."""
PER_LOOK = 2
"""Operations of a look at one worker: its file, and its lock."""

LOOK_LOCAL_S = 0.05
"""Maximum seconds between two looks on a filesystem of this machine."""
AT_START = 2048
"""Journals that all workers of a restarted job read together at their start."""
_LEAST_AT_START = 8
"""Minimum number of these journals per worker, however many workers there are."""

_FIRST_LOCAL_S = 0.002
_TICK_S = 1.0
_POLL_SHARED_S = 1.0
_POLL_FEW_S, _FEW_WAIT = 0.2, 1 / 16
"""Seconds between polls of a few workers while items may be added, or a part of the time waited so
far if that is longer, up to the pause of others."""
_SOON = 0.5
"""Longest pause between polls for items that may come soon, as a part of the time waited so far."""
_SCAN_FIRST_S = 0.03
_SCAN_LOCAL_S = 0.5
_SCAN_SHARED_S = 15.0
_ON_DUTY = 8
"""About this many waiting workers scan often and the others seldom.

The worker whose watch shows a death may be busy for hours; only a worker that looks twice can see
the silence itself, so a few must look often.
"""
_DUTY_PER_S = 15.0
"""The part of SCANS_PER_S that workers on duty share."""
_SHIFT_S = 3600.0
_MOST_NODES = 2
"""Other nodes at which a worker looks: so each node is watched though a worker is busy or gone."""
_WATCH_LOCAL_S = 0.5
_WATCH_SHARED_S = 30.0


def pause_local_s(waited_s: float) -> float:
    """Seconds until the next look on a filesystem of this machine, after waiting ``waited_s``.

    Short waits are not prolonged much, and long waits cost little.
    """
    return min(LOOK_LOCAL_S, max(_FIRST_LOCAL_S, waited_s / 4))


class Pacing:
    """Schedules when one worker polls the log, scans for free units and watches other workers."""

    def __init__(
        self,
        clock: Clock,
        *,
        local: bool,
        workers: int,
        lease_s: float,
        seed: str,
        watchers: int | None = None,
    ) -> None:
        """``watchers``: those of the workers that watch other nodes; None: all."""
        import random  # commands that only read a run do not need it

        self._clock = clock
        self._random = random.Random(seed)
        self.local = local
        """Whether looks cost other hosts nothing."""
        self.workers = max(1, workers)
        """Workers alive, as far as this worker knows; they share the operations."""
        self.watchers = self.workers if watchers is None else max(1, watchers)
        """Workers that watch others as this one does; they share the looks and the listings."""
        self._lease_s = lease_s
        now = self._began = self._began_watch = clock.monotonic()
        self.poll_now()
        self._growing = True
        self._least_s = _POLL_SHARED_S
        self._alone = True
        self._others_wait_since: float | None = None
        # A watch lists all workers, and thousands may start at once.
        spread_s = 0.0 if local else max(0.0, self.watchers / LISTINGS_PER_S - 1.0)
        self._watch_at = now + _WATCH_LOCAL_S + random.Random(seed).uniform(0.0, spread_s)
        self._scan_s = _SCAN_FIRST_S
        self._scan_at = float("-inf")
        self._busy = True
        self._waits_since = now
        self._operations = 0
        self.on_duty = False
        """Whether this worker is one of those that scan often."""
        self._shift_ends = now

    @property
    def poll_due(self) -> bool:
        return self.local or self._clock.monotonic() >= self._poll_at

    def share_looks(self, *, alone: bool, others_wait_since: float | None) -> None:
        """Note what other workers of this node do.

        ``alone``: none of them looks for new items on behalf of this one; ``others_wait_since``:
        when one for which this worker looks last began to wait, None if none waits.
        """
        if alone and not self._alone:
            self.poll_now()  # its own next look may be minutes away
        self._alone, self._others_wait_since = alone, others_wait_since

    def poll_now(self) -> None:
        """Have the log polled at the next chance."""
        self._poll_at = float("-inf")

    def polled(self, heads: int, *, growing: bool = True) -> None:
        """Record that ``heads`` files named ``head`` were opened just now.

        ``growing``: whether items may still be added to the run.
        """
        self._growing = growing
        now = self._clock.monotonic()
        waits = [] if self._busy else [self._waits_since]
        if self._others_wait_since is not None:
            waits.append(self._others_wait_since)
        waited_s = now - max(waits, default=now)
        poll_s = heads * self.watchers / POLLS_PER_S
        if not self._alone:
            poll_s = heads * self.workers / MATES_POLLS_PER_S
        few_s = max(_POLL_FEW_S, poll_s, _FEW_WAIT * waited_s)
        self._least_s = min(_POLL_SHARED_S, few_s) if growing else _POLL_SHARED_S
        if growing and self._alone and waits:
            poll_s = min(poll_s, _SOON * waited_s)
        self._poll_at = now + max(self._least_s, poll_s) * self._random.uniform(1.0, 1.25)

    @property
    def waits(self) -> bool:
        """Whether this worker has looked for work since it last found any."""
        return not self._busy

    @property
    def wait_s(self) -> float:
        """Seconds to sleep when there is nothing to do; heartbeats come between sleeps."""
        now = self._clock.monotonic()
        if self.local:
            return pause_local_s(now - self._waits_since)
        return min(_TICK_S, max(0.001, min(self._poll_at, self._scan_at) - now))

    def worked(self) -> None:
        """Record that work was found, so that the next scan comes soon."""
        self._scan_s = _SCAN_FIRST_S
        self._busy = True
        if self.local:
            # A scan reads what all workers wrote, and they may write more before it ends.
            self._scan_at = self._clock.monotonic() + _SCAN_FIRST_S

    def scan_due(self) -> bool:
        """Whether to scan for units to take over; after a scan, call :meth:`scanned`."""
        self._began = self._clock.monotonic()
        if not self.local and (self._busy or self._began >= self._shift_ends):
            self._begin_shift()
        if self._busy:
            self._waits_since = self._began
            if self._growing:
                self._poll_at = min(self._poll_at, self._began + self._least_s)
        self._busy = False
        return self._began >= self._scan_at

    def _begin_shift(self) -> None:
        """Draw by lot whether this worker is on duty from now on."""
        was = self.on_duty
        self.on_duty = self._random.random() * self.workers < _ON_DUTY
        self._shift_ends = self._began + _SHIFT_S * self._random.uniform(0.5, 1.5)
        # Workers run out of units at the same time, and a first scan reads every journal.
        every_s = self._pause_s * max(self._operations, self.workers)
        scan_at = self._began + self._random.uniform(0.0, every_s)
        if self.on_duty and not was:
            self._scan_at = scan_at  # the time set off duty may be far away
            self._scan_s = _SCAN_FIRST_S
        elif self._busy:
            self._scan_at = max(self._scan_at, scan_at)

    @property
    def _pause_s(self) -> float:
        """Seconds for each operation of a scan, given this worker's part of all operations."""
        if self.workers <= _ON_DUTY:
            return self.workers / SCANS_PER_S
        if self.on_duty:
            return _ON_DUTY / _DUTY_PER_S
        return self.workers / (SCANS_PER_S - _DUTY_PER_S)

    def scanned(self, *, found: bool, operations: int) -> None:
        """Record the end of a scan that cost ``operations`` metadata operations."""
        first = self._scan_s <= _SCAN_FIRST_S
        longest = _SCAN_LOCAL_S if self.local else min(_SCAN_SHARED_S, self._lease_s / 4)
        self._scan_s = _SCAN_FIRST_S if found else min(longest, self._scan_s * 2)
        self._operations = operations
        now = self._clock.monotonic()
        if self.local:
            # The first scan after work does not count: it reads what all workers wrote meanwhile.
            cost_s = 0.0 if first else now - self._began
            self._scan_at = self._began + max(self._scan_s, 20 * cost_s)
        elif found:
            self._scan_at = now  # there may be more free units
        else:
            part_s = self._pause_s * operations * self._random.uniform(1.0, 1.5)
            if first and self.on_duty:
                part_s = 0.0  # its cost already delayed it, and the next scan costs less
            self._scan_at = now + max(self._scan_s, part_s)

    @property
    def looks_at_start(self) -> int:
        """Number of journals to read first after a restart of the job."""
        return sys.maxsize if self.local else max(_LEAST_AT_START, AT_START // self.workers)

    def watch_due(self) -> bool:
        """Whether to look for deaths and requests; after the look, call :meth:`watched`."""
        self._began_watch = self._clock.monotonic()
        return self._began_watch >= self._watch_at

    @property
    def at_most(self) -> int | None:
        """Number of other nodes to look at in one watch; None for all workers."""
        if self.local:
            return None
        return max(1, min(_MOST_NODES, int(LOOKS_PER_S * self.watch_s / PER_LOOK / self.watchers)))

    @property
    def watch_s(self) -> float:
        """Seconds between two watches on a shared filesystem."""
        # A death should be seen soon after the lease.
        listings = self.watchers * (1 + 1 / NAMES_EVERY)
        return max(min(_WATCH_SHARED_S, self._lease_s / 4), listings / LISTINGS_PER_S)

    def watched(
        self, workers: int, lease_left_s: float = math.inf, watchers: int | None = None
    ) -> None:
        """Record the end of a watch, after which ``workers`` workers seem to be alive.

        ``lease_left_s``: seconds until a silent worker counts as dead. ``watchers``: as at the
        start.
        """
        self.workers = max(1, workers)
        self.watchers = self.workers if watchers is None else max(1, watchers)
        now = self._clock.monotonic()
        local_s = max(_WATCH_LOCAL_S, 20 * (now - self._began_watch))
        shared_s = min(self.watch_s, max(_TICK_S, lease_left_s))
        self._watch_at = now + (local_s if self.local else shared_s)

    @property
    def judge_s(self) -> float:
        return 1.0 if self.local else _SCAN_SHARED_S
