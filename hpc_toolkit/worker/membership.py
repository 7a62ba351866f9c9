"""A worker's membership in a run: its own files, its heartbeat, and the request to exit."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.queue.leases import WorkerLock, heartbeat_interval_s
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, PresenceFile
from hpc_toolkit.rundir import files, trust
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.system.ranks import RankInfo

_UPDATE_S = 1.0
_CLAIM_S = 10.0
"""At most one unit in this many seconds is shown to other hosts before a heartbeat is due."""
_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE, of fallocate(2)
_BLOCK = 1 << 12
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


def new_name(prefix: str = "") -> str:
    """A name that no worker had before."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", prefix + host_name())
    return f"{host}-{os.getpid()}-{os.urandom(3).hex()}"


def beat_s(workers: int, node: int, lease_s: float) -> float:
    """Seconds between heartbeats; twice as long for a worker that does not beat for its node."""
    return min(heartbeat_interval_s(workers if node else 2 * workers), lease_s / 4)


class ShownUnit:
    """When to show other hosts the unit that a worker runs, although no heartbeat is due.

    A unit of which a dead worker wrote no line is only found by what the worker showed, or by a
    scan of waiting workers. Units of a second each are not shown: that would double the writes.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._claim, self._at = clock, "", clock.monotonic()

    def is_due(self, claim: str) -> bool:
        """``claim``: as in :class:`hpc_toolkit.queue.presence.Presence`."""
        new = claim not in {"", self._claim}
        return new and self._clock.monotonic() - self._at >= _CLAIM_S

    def show(self, claim: str) -> None:
        """Record that the server has it."""
        if claim not in {"", self._claim}:
            self._at = self._clock.monotonic()
        self._claim = claim


class Counts(NamedTuple):
    """What a worker has done since its start."""

    done: int
    """Items done."""
    failed: int
    """Attempts that failed."""
    deaths: int
    """Executors that died."""


class Drain:
    """Whether this worker must exit, and when its running item is interrupted.

    A request to exit cannot be withdrawn; a later one may only shorten the grace period.
    """

    def __init__(self, clock: Clock, deadline: float | None = None) -> None:
        """``deadline``: epoch seconds by which the worker must have exited; None: no limit."""
        self._clock = clock
        self._interrupt_at = math.inf
        self.deadline = None if deadline is None else clock.monotonic() + deadline - clock.wall()
        """Monotonic time after which no item should run."""
        self.reason = ""
        """Why the worker exits, by the first request."""
        self.requested = False
        """Whether no further item may start."""

    def request(self, reason: str, grace_s: float) -> None:
        """Exit after the running item, which is interrupted after ``grace_s`` seconds."""
        self.requested = True
        self.reason = self.reason or reason
        self._interrupt_at = min(self._interrupt_at, self._clock.monotonic() + grace_s)

    @property
    def interrupts(self) -> bool:
        """Whether the running item must end now, without an attempt being counted."""
        return self._clock.monotonic() >= self._interrupt_at

    def check_deadline(self) -> None:
        if self.deadline is not None and self._clock.monotonic() >= self.deadline:
            self.request("the deadline has come", 0.0)


class Membership:
    """A worker's name, the files of the run that it alone writes, and its heartbeat.

    Progress is published within a second on this host, and with each heartbeat elsewhere.
    """

    def __init__(
        self,
        paths: RunPaths,
        rank: RankInfo,
        clock: Clock,
        lease_s: float,
        log_limit: float = math.inf,
        *,
        name: str,
        pool: int = 0,
        has: dict[str, Any] | None = None,
    ) -> None:
        """``log_limit``: bytes of the worker's log above which its oldest output is removed.

        ``name``: one that no worker had (:func:`new_name`). ``pool``: as in
        :class:`hpc_toolkit.worker.worker.WorkerOptions`; ``has``: what others see that it has for
        stages with needs. Raises OSError: the name must not be tried again.
        """
        self.name = name
        self._paths, self._clock, self._lease_s = paths, clock, lease_s
        try:
            self.lock = WorkerLock(paths.worker_lock(self.name))
            self.workers = rank.world_size
            """Workers of the run, as far as is known at the start."""
            if rank.world_size == 1:
                # Thousands of ranks start at once, and would list thousands of names each.
                self.workers = len(files.list_names(paths.workers)) // 2
            self.local = trust.is_local(paths.root)
            """Whether the run is on a filesystem of this kernel alone."""
            here = Presence.here(
                self.name,
                rank,
                interval_s=beat_s(self.workers, 1, lease_s),
                at=clock.wall(),
                pool=pool,
            )
            if has:
                here = replace(here, place={**here.place, "has": has})
            self._file = PresenceFile(paths.worker(self.name), here, local=self.local)
            self.journal = JournalWriter(paths.journal(self.name))
            # If an executor failed to create its log, it would die and its item become a suspect.
            self._log, self._log_limit, self._removed = paths.worker_log(self.name), log_limit, 0
            os.close(files.open_or_create(self._log, os.O_WRONLY))
            for directory in (paths.workers, paths.journals):
                files.sync_directory(directory)
            self._beat_at = self._update_at = clock.monotonic()
            self._unit = ShownUnit(clock)
        except OSError:
            self._undo()
            raise

    def _undo(self) -> None:
        """Remove what a name that claimed nothing left, as far as the filesystem allows."""
        for name in ("lock", "_file", "journal"):
            if (made := getattr(self, name, None)) is not None:
                with suppress(OSError):
                    made.close()
        for path in (self._paths.worker, self._paths.worker_lock, self._paths.journal):
            with suppress(OSError):
                path(self.name).unlink()

    @property
    def presence(self) -> Presence:
        return self._file.presence

    def beat_if_due(
        self, counts: Counts, drain: Drain, *, claim: str, node: int, workers: int
    ) -> None:
        """Publish what changed.

        ``claim``: as in :class:`Presence`; ``node``: the workers of this node that it watches for,
        0 if another one does; ``workers``: those that beat as often as this one.
        """
        now, shown = self._clock.monotonic(), self.presence
        interval_s = beat_s(workers, node, self._lease_s)
        due = now - self._beat_at >= interval_s
        # Others must know the unit, and that this worker beats for its node.
        due |= self._unit.is_due(claim) and not self.local
        due |= bool(node) != bool(shown.node) and not self.local
        drains = drain.requested and shown.state != DRAINING
        before = (shown.done, shown.failed, shown.deaths, shown.journal, shown.claim)
        changed = (*counts, self.journal.synced, claim) != before
        if not (due or drains or (changed and now >= self._update_at)):
            return
        if due:
            self._beat_at = now  # unsynced updates may reach other hosts 30 s late
            self._unit.show(claim)
        self._update_at = now + _UPDATE_S
        facts = {"claim": claim, "node": node, "interval_s": interval_s, **counts._asdict()}
        state = DRAINING if drain.requested else shown.state
        self._show(state, drain.reason, sync=due, journal=self.journal.synced, **facts)

    def _show(self, state: str, note: str, **facts: Any) -> None:
        self._file.update(state=state, note=note, at=round(self._clock.wall(), 3), **facts)

    def trim_log(self) -> None:
        """Free the space of the log's oldest output. The file's size and all offsets in it stay."""
        if self._log_limit == math.inf:
            return
        with suppress(OSError), self._log.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size - self._removed <= self._log_limit:
                return
            self._removed = (size - int(self._log_limit) // 2) // _BLOCK * _BLOCK
            if _fallocate(file.fileno(), _PUNCH_HOLE, 0, self._removed):
                self._log_limit = math.inf
                why = os.strerror(ctypes.get_errno())
                sys.stderr.write(f"warning: {self._log} keeps all output: {why}\n")

    def finish(self, counts: Counts, reason: str) -> None:
        """Sync the journal, and report that the worker has exited; do what the disk allows."""
        with suppress(OSError):
            self.journal.sync()
            self._show(FINISHED, reason, journal=self.journal.synced, **counts._asdict())

    def pause(self, note: str) -> bool:
        """Show why this name writes no more, without a sign of life: others take its units over.

        False: the filesystem did not take that.
        """
        shown = False
        with suppress(OSError):
            self._file.reopen()
            self._show(DRAINING, note[:200], beats=False)
            shown = True
        with suppress(OSError):  # a wait of hours has a thousand names
            self._file.close()
        return shown

    def end(self, note: str) -> None:
        """Show that the worker goes on under another name; OSError: it may not do so yet."""
        self._file.reopen()
        self._show(FINISHED, note[:200], journal=self.journal.synced)
        self._file.close()
