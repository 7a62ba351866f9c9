"""When a worker looks at the run: often where that is cheap, seldom where others pay for it.

On a filesystem of this machine alone a look costs this machine's time, of which looking may take a
twentieth. On a shared one all workers of a run share a fixed number of metadata operations a
second, however many they are: each takes its part, at times of its own.
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.system.clock import Clock

# Operations a second of a whole run on a shared filesystem, by purpose; together below 100.
POLLS_PER_S = 20.0
"""Openings of ``head``."""
SCANS_PER_S = 35.0
"""What scans for units to take over cost, those on duty and the others together."""
LOOKS_PER_S = 25.0
"""Readings of files in ``workers/``, and questions for locks."""
LISTINGS_PER_S = 10.0
"""Of ``workers/`` and ``control/``."""

READINGS_PER_S = 20.0
"""Files that the one process that decides asks for."""
PER_LOOK = 2
"""Operations of a look at one worker: its file, and its lock."""

LOOK_LOCAL_S = 0.05
"""Seconds between two looks on a filesystem of this machine, at most."""
AT_START = 2048
"""Journals that all workers of a job that starts again read together,"""
_LEAST_AT_START = 8
"""or each of them, where there are many."""

_FIRST_LOCAL_S = 0.004
_TICK_S = 1.0
_POLL_SHARED_S = 1.0
_SCAN_FIRST_S = 0.03
_SCAN_LOCAL_S = 0.5
_SCAN_SHARED_S = 15.0
_ON_DUTY = 8
"""About so many waiting workers scan often and the others seldom, because a silence is seen by the
one who looks twice."""
_DUTY_PER_S = 15.0
"""The part of SCANS_PER_S of those on duty."""
_SHIFT_S = 3600.0
_WATCH_LOCAL_S = 0.5
_WATCH_SHARED_S = 30.0


def pause_local_s(waited_s: float) -> float:
    """Seconds until the next look on a filesystem of this machine, after so long a wait.

    What takes a moment is not waited for as long again, and long waits cost little.
    """
    return min(LOOK_LOCAL_S, max(_FIRST_LOCAL_S, waited_s / 4))


class Pacing:
    """The times at which one worker polls the log, scans for free units and watches the others."""

    def __init__(
        self, clock: Clock, *, local: bool, workers: int, lease_s: float, seed: str
    ) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self.local = local
        """Whether looks cost nobody else anything."""
        self.workers = max(1, workers)
        """That live, as far as this worker knows; they share the operations."""
        self._lease_s = lease_s
        now = self._began = self._began_watch = clock.monotonic()
        self._poll_at = float("-inf")
        self._watch_at = now + _WATCH_LOCAL_S
        self._scan_s = _SCAN_FIRST_S
        self._scan_at = float("-inf")
        self._busy = True
        self._waits_since = now
        self._operations = 0
        self.on_duty = False
        """Whether it is one of those who scan often."""
        self._shift_ends = now

    @property
    def poll_due(self) -> bool:
        """Whether to ask for new entries of the log."""
        return self.local or self._clock.monotonic() >= self._poll_at

    def polled(self, heads: int) -> None:
        """So many ``head`` files were opened just now."""
        poll_s = max(_POLL_SHARED_S, heads * self.workers / POLLS_PER_S)
        self._poll_at = self._clock.monotonic() + poll_s * self._random.uniform(1.0, 1.25)

    @property
    def wait_s(self) -> float:
        """How long to sleep when there is nothing to do; the heart beats in between."""
        now = self._clock.monotonic()
        if self.local:
            return pause_local_s(now - self._waits_since)
        return min(_TICK_S, max(0.001, min(self._poll_at, self._scan_at) - now))

    def worked(self) -> None:
        """Work was found: what it leaves behind is looked for soon."""
        self._scan_s = _SCAN_FIRST_S
        self._busy = True
        if self.local:
            # A scan reads what all wrote, and more may follow before it ends.
            self._scan_at = self._clock.monotonic() + _SCAN_FIRST_S

    def scan_due(self) -> bool:
        """Whether to scan for units to take over; :meth:`scanned` must follow where it is."""
        self._began = self._clock.monotonic()
        if not self.local and (self._busy or self._began >= self._shift_ends):
            self._begin_shift()
        if self._busy:
            self._waits_since = self._began
        self._busy = False
        return self._began >= self._scan_at

    def _begin_shift(self) -> None:
        """Draw whether to be on duty from now on."""
        was = self.on_duty
        self.on_duty = self._random.random() * self.workers < _ON_DUTY
        self._shift_ends = self._began + _SHIFT_S * self._random.uniform(0.5, 1.5)
        # All run out of units at the same time, and a first scan reads every journal.
        every_s = self._pause_s * max(self._operations, self.workers)
        scan_at = self._began + self._random.uniform(0.0, every_s)
        if self.on_duty and not was:
            self._scan_at = scan_at  # before it, there was all the time in the world
            self._scan_s = _SCAN_FIRST_S
        elif self._busy:
            self._scan_at = max(self._scan_at, scan_at)

    @property
    def _pause_s(self) -> float:
        """Seconds for each operation of a scan, by this worker's part of them all."""
        if self.workers <= _ON_DUTY:
            return self.workers / SCANS_PER_S
        if self.on_duty:
            return _ON_DUTY / _DUTY_PER_S
        return self.workers / (SCANS_PER_S - _DUTY_PER_S)

    def scanned(self, *, found: bool, operations: int) -> None:
        """A scan ended, which cost so many metadata operations."""
        first = self._scan_s <= _SCAN_FIRST_S
        longest = _SCAN_LOCAL_S if self.local else min(_SCAN_SHARED_S, self._lease_s / 4)
        self._scan_s = _SCAN_FIRST_S if found else min(longest, self._scan_s * 2)
        self._operations = operations
        now = self._clock.monotonic()
        if self.local:
            # The first scan after work does not count: it reads what all wrote meanwhile.
            cost_s = 0.0 if first else now - self._began
            self._scan_at = self._began + max(self._scan_s, 20 * cost_s)
        elif found:
            self._scan_at = now  # there may be more of it
        else:
            part_s = self._pause_s * operations * self._random.uniform(1.0, 1.5)
            if first and self.on_duty:
                part_s = 0.0  # it was put off for its price already, and the next one costs less
            self._scan_at = now + max(self._scan_s, part_s)

    @property
    def looks_at_start(self) -> int:
        """How many journals to read first where the job was started again."""
        return sys.maxsize if self.local else max(_LEAST_AT_START, AT_START // self.workers)

    def watch_due(self) -> bool:
        """Whether to look who lives and what is asked; :meth:`watched` must follow where it is."""
        self._began_watch = self._clock.monotonic()
        return self._began_watch >= self._watch_at

    @property
    def at_most(self) -> int | None:
        """How many other workers to look at in one watch; None for all."""
        if self.local:
            return None
        return max(1, int(LOOKS_PER_S * self.watch_s / PER_LOOK / self.workers))

    @property
    def watch_s(self) -> float:
        """Seconds between two watches on a shared filesystem."""
        # A death is to be seen soon after the lease.
        return max(min(_WATCH_SHARED_S, self._lease_s / 4), 2 * self.workers / LISTINGS_PER_S)

    def watched(self, workers: int) -> None:
        """A watch ended, and so many workers seem to live."""
        self.workers = max(1, workers)
        now = self._clock.monotonic()
        local_s = max(_WATCH_LOCAL_S, 20 * (now - self._began_watch))
        self._watch_at = now + (local_s if self.local else self.watch_s)

    @property
    def judge_s(self) -> float:
        """How long after a look at all failures the next one may follow."""
        return 1.0 if self.local else _SCAN_SHARED_S
