"""The workers of a run: which live, how each ended, whose clocks are ahead, and their journals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.presence import FINISHED, Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir import trust
from hpc_toolkit.rundir.journal import JournalReader, Line, read_lines, read_unit_run
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
from hpc_toolkit.system.record import Record

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


class HostLine(Record):
    """The workers of a host at one moment."""

    host: str
    alive: int
    busy: int
    """Living workers that hold a unit with pending items."""
    died: int
    deaths: int
    """Workers and executors that died."""
    rate_per_s: float
    """Items done per second by its living workers."""


def read_hosts(
    view: RunView, seen: Mapping[str, Presence | None], alive: Collection[str]
) -> list[HostLine]:
    """The hosts that have living or dead workers, hosts with deaths and idle workers first.

    Opens no file but claims that the view has not read before. Workers that ended are left out.
    """
    busy = set[str]().union(*(one.holders(one.state.open) for one in view.stages.values()))
    hosts: dict[str, list[Presence]] = {}
    for one in seen.values():
        if one is not None and one.state != FINISHED:
            hosts.setdefault(one.host, []).append(one)
    lines = []
    for host, workers in hosts.items():
        living = [one.worker for one in workers if one.worker in alive]
        died = len(workers) - len(living)
        lines.append(
            HostLine(
                host=host,
                alive=len(living),
                busy=len(busy.intersection(living)),
                died=died,
                deaths=died + sum(one.deaths for one in workers),
                rate_per_s=rate_of(view, living),
            )
        )
    return sorted(lines, key=lambda one: (-one.died, one.busy - one.alive, -one.deaths, one.host))


def rate_of(view: RunView, workers: Iterable[str]) -> float:
    """Items done per second by these workers, over their last unit runs."""
    paces = [map(sum, zip(*view.pace[one], strict=True)) for one in workers if view.pace.get(one)]
    return sum(done / seconds for done, seconds in paces if seconds > 0)


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


def pause_s(view: RunView, at_least: float) -> float:
    """Seconds until a process that reads the files of all workers each time may do so again."""
    is_local = trust.is_local(view.paths.root)
    return at_least if is_local else max(at_least, 2 * len(view.readers) / FILES_PER_S)
