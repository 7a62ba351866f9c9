"""The workers of a run: which live, how each ended, whose clocks are ahead, and their journals.

A view of their progress reads them in turns, so that it costs few file operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader, Line, read_lines, read_unit_run
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
from hpc_toolkit.system.record import Record, replace

ALIVE, DRAINED, DIED, UNKNOWN = "alive", "drained", "died", "unknown"
"""How a worker ended, if not :data:`FINISHED`: nothing was left to do. ``drained``: it exited
early, and its note says why. Whether a worker is alive is a guess."""

_AHEAD_S = 120.0
"""Clocks that are ahead by less are not reported."""


def reachable_workers(view: RunView, clock: Clock) -> set[str]:
    """Workers that a request may reach: all but those that have left or died on this host.

    Workers of other hosts count even if they seem dead, because their clocks may be wrong.
    """
    seen, here = view.presences(), (host_name(), boot_id())
    return living_workers(view, clock, seen) | {
        name
        for name, one in seen.items()
        if one is not None and one.state != FINISHED and (one.host, one.boot) != here
    }


def living_workers(
    view: RunView, clock: Clock, seen: dict[str, Presence | None] | None = None
) -> set[str]:
    """Workers that have not left and do not seem dead; a guess that no rule of the queue uses.

    A worker whose presence cannot be read may be alive, so it is among them.
    ``seen`` are the workers' presences; None: read them.
    """
    here = (host_name(), boot_id())
    seen = view.presences() if seen is None else seen
    # A worker that was silent more than once has several notices.
    _, given = ControlReader(view.paths).poll()
    notices = {(one.worker, one.heartbeat) for one in given if one.final}

    def alive(name: str, one: Presence) -> bool:
        left = one.state == FINISHED or (name, one.heartbeat) in notices
        return not left and _seems_alive(one, here, clock)

    return {name for name, one in seen.items() if one is None or alive(name, one)}


def _seems_alive(presence: Presence, here: tuple[str, str], clock: Clock) -> bool:
    """For display only: workers judge each other by what they observe themselves."""
    if (presence.host, presence.boot) == here:
        ticks = process_ticks(presence.pid)
        return ticks > 0 and presence.ticks in {0, ticks}
    silence = clock.wall() - presence.at
    return silence < max(DEFAULT_LEASE_S, 3 * presence.interval_s)


def end_of(name: str, presence: Presence | None, alive: set[str]) -> str:
    """How a worker ended: ``alive``, ``finished``, ``drained``, ``died`` or ``unknown``."""
    if presence is None:
        return UNKNOWN
    if presence.state == FINISHED:
        return DRAINED if presence.note else FINISHED
    return ALIVE if name in alive else DIED


def clocks_ahead(seen: Mapping[str, Presence | None], clock: Clock) -> list[str]:
    """Hosts whose workers wrote heartbeats at times that are still to come."""
    late = clock.wall() + _AHEAD_S
    return sorted({one.host for one in seen.values() if one is not None and one.at > late})


def not_shown(behind: list[str]) -> str:
    """Message about workers whose journals this host shows as old copies."""
    some = ", ".join(behind[:3]) + (", ..." if len(behind) > 3 else "")
    return f"this host does not show all that {some} wrote"


class WorkerLine(Record):
    """A worker at one moment."""

    name: str
    state: str
    """``alive``, ``draining`` or ``died``."""
    is_busy: bool
    """Whether it holds a unit with pending items."""
    rate_per_s: float
    """Items done per second over its last unit runs; 0 unless it is alive."""
    done: int
    failed: int
    """Attempts that failed."""
    deaths: int
    """Executors that died."""
    note: str
    """Why it stops or has stopped."""


class HostLine(Record):
    """A host and its workers, by name."""

    host: str
    workers: tuple[WorkerLine, ...]

    @property
    def alive(self) -> int:
        return sum(one.state in (ALIVE, DRAINING) for one in self.workers)

    @property
    def busy(self) -> int:
        return sum(one.is_busy for one in self.workers)

    @property
    def died(self) -> int:
        return sum(one.state == DIED for one in self.workers)

    @property
    def deaths(self) -> int:
        """Workers and executors that died."""
        return self.died + sum(one.deaths for one in self.workers)

    @property
    def rate_per_s(self) -> float:
        return sum(one.rate_per_s for one in self.workers)


def read_hosts(
    view: RunView, seen: Mapping[str, Presence | None], alive: set[str]
) -> list[HostLine]:
    """The hosts that have living or dead workers, hosts with deaths and idle workers first.

    Opens no file but claims that the view has not read before. Workers that ended are left out.
    """
    busy = set[str]().union(*(one.holders(one.state.open) for one in view.stages.values()))
    hosts: dict[str, list[WorkerLine]] = {}
    for name, presence in seen.items():
        if presence is not None and presence.state != FINISHED:
            line = _worker(view, presence, is_alive=name in alive, is_busy=name in busy & alive)
            hosts.setdefault(presence.host, []).append(line)
    lines = [HostLine(host, tuple(workers)) for host, workers in hosts.items()]
    return sorted(lines, key=lambda one: (-one.died, one.busy - one.alive, -one.deaths, one.host))


def _worker(view: RunView, one: Presence, *, is_alive: bool, is_busy: bool) -> WorkerLine:
    done, seconds = map(sum, zip(*view.pace.get(one.worker) or ((0, 0.0),), strict=True))
    return WorkerLine(
        name=one.worker,
        state=DIED if not is_alive else DRAINING if one.state == DRAINING else ALIVE,
        is_busy=is_busy,
        rate_per_s=done / seconds if is_alive and seconds > 0 else 0.0,
        done=one.done,
        failed=one.failed,
        deaths=one.deaths,
        note=one.note,
    )


ATTEMPTS = ("done", "failed", "permanent")
"""Types of the journal lines that end an attempt."""
_MEMORY = 1 << 26
"""Bytes of all journals together that are held in memory."""
_LEAST_CHUNK, _MOST_CHUNK = 1 << 13, 1 << 20


def lines_of(view: RunView, worker: str) -> Iterator[Line]:
    """The lines of a journal that the view has read; a bounded part of them is in memory.

    A journal that cannot be read ends here, and the view's ``unreadable`` has the error.
    """
    path = view.readers[worker].path
    try:
        yield from read_lines(path, 0, end_of_journal(view, worker), chunk_of(view))
    except OSError as error:
        view.unreadable[worker] = error


def end_of_journal(view: RunView, worker: str) -> int:
    """Where the complete lines end that the view has read."""
    reader = view.readers[worker]
    return reader.size - reader.torn_bytes


def chunk_of(view: RunView) -> int:
    """Bytes of each journal that are held in memory at once."""
    return min(_MOST_CHUNK, max(_LEAST_CHUNK, _MEMORY // max(1, len(view.readers))))


def records_of(view: RunView, worker: str, unit: str = "") -> Iterator[dict[str, Any]]:
    """The lines of a worker's journal; of unit runs, only those of ``unit`` if it is given."""
    path = view.paths.journal(worker)
    for found in JournalReader(path).poll():
        if isinstance(found, Line):
            yield found.record
        elif unit in ("", found.record["unit"]):
            yield from read_unit_run(path, found)
            yield found.record


FILES_PER_S = 40.0
"""Presences and journals that one view opens per second on a shared filesystem.

All idle workers of a run together use less than 100 operations per second.
"""
_LOCAL_FILES = 500
"""Files per look on a filesystem of this kernel, where only this process pays for them."""
_LEAST_FILES = 16
_LIST_S = 10.0
"""Seconds between two listings of claims and workers: a listing may have ten thousand names."""


def pause_s(view: RunView, at_least: float) -> float:
    """Seconds until a process that reads the files of all workers each time may do so again."""
    is_local = files.is_local(view.paths.root)
    return at_least if is_local else max(at_least, 2 * len(view.readers) / FILES_PER_S)


class _Read(Record):
    presence: Presence | None
    at: float
    """Monotonic seconds."""
    is_last: bool
    """Whether nothing can follow: the worker had left, and its journal was read after that."""


class Sampler:
    """Follows a run: the first look reads everything, later ones new workers and some of the rest.

    Workers are read in turn, and a worker's journal only if its presence shows progress. Nothing
    is written.
    """

    def __init__(self, view: RunView, clock: Clock) -> None:
        self._view, self._clock = view, clock
        self._is_local = files.is_local(view.paths.root)
        self._reads: dict[str, _Read] = {}
        """By worker, the one that was read longest ago first."""
        self._gone: set[str] = set()
        self._looked = self._listed = float("-inf")

    def look(self) -> dict[str, Presence | None]:
        """Read what is due; return every worker's presence as if it had been read now."""
        now = self._clock.monotonic()
        passed_s, self._looked = now - self._looked, now
        for stage in self._view.stages.values():
            stage.poll_log()
        first = self._new_workers(now) + self._ended_here()
        most = _LOCAL_FILES
        if not self._is_local and self._reads:
            most = max(_LEAST_FILES, int(FILES_PER_S * min(passed_s, _LIST_S)))
        stages = self._view.stages.values()
        if all(one.complete or one.log.reported_complete for one in stages):
            # A worker reported that no item is pending: the last lines must be read now.
            most = 2 * len(self._reads)
        for worker in first:
            most -= self._read(worker)
        for worker in [name for name, read in self._reads.items() if not read.is_last]:
            if most <= 0:
                break
            if self._reads[worker].at < now:
                most -= self._read(worker)
        return {worker: self._aged(self._reads[worker], now) for worker in sorted(self._reads)}

    def oldest_s(self) -> float:
        """Seconds since the worker was read whose turn is next; 0 if every worker has ended."""
        turn = (read.at for read in self._reads.values() if not read.is_last)
        return max(0.0, self._clock.monotonic() - next(turn, float("inf")))

    def _new_workers(self, now: float) -> list[str]:
        if now - self._listed < (0 if self._is_local else _LIST_S):
            return []
        self._listed = now
        self._view.poll_claims()
        names = sorted(files.list_names(self._view.paths.workers))
        workers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return [worker for worker in workers if worker not in self._reads]

    def _ended_here(self) -> list[str]:
        """Workers of this host whose processes ended since they were read: finished, or dead."""
        here = (host_name(), boot_id())
        found = [
            worker
            for worker, read in self._reads.items()
            if (one := read.presence) is not None
            and (one.host, one.boot) == here
            and not read.is_last
            and worker not in self._gone
            and not process_ticks(one.pid)
        ]
        self._gone.update(found)
        return found

    def _read(self, worker: str) -> int:
        """Read one worker; return the number of files opened."""
        presence = self._view.presence(worker)
        read = self._view.poll_if_moved(worker, None if presence is None else presence.progress)
        # A journal is complete when it was read once more after the worker's last change.
        is_last = presence is not None and presence.state == FINISHED and not read
        self._reads.pop(worker, None)
        self._reads[worker] = _Read(presence, self._clock.monotonic(), is_last)
        return 1 + read

    @staticmethod
    def _aged(read: _Read, now: float) -> Presence | None:
        """The presence with its heartbeat as old as it was when it was read."""
        one = read.presence
        if one is None or one.state == FINISHED:
            return one
        return replace(one, at=one.at + max(0.0, now - read.at))
