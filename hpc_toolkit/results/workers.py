"""The workers of a run: which live, how each ended, on which hosts, and how far clocks are off."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.queue.presence import DRAINING, FINISHED
from hpc_toolkit.results.journals import last_line_at
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks
from hpc_toolkit.system.record import Record, replace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.system.clock import Clock

ALIVE, DRAINED, DIED, UNKNOWN = "alive", "drained", "died", "unknown"
"""How a worker ended, if not :data:`FINISHED`: nothing was left to do. ``drained``: it exited
early, and its note says why. Whether a worker is alive is a guess."""

OFF_S = 120.0
"""Clocks that differ by less are not reported: a busy file server writes a heartbeat late."""


def reachable_workers(
    view: RunView, clock: Clock, seen: dict[str, Presence | None] | None = None
) -> set[str]:
    """Workers that a request may reach: all but those that have left or died on this host.

    Workers of other hosts count even if they seem dead, because their clocks may be wrong.
    ``seen`` as for :func:`living_workers`.
    """
    seen = view.presences() if seen is None else seen
    here = (host_name(), boot_id())
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


def corrected(one: Presence, ahead: dict[str, float]) -> Presence:
    late = ahead.get(one.host, 0.0)
    return replace(one, started=one.started - late, at=one.at - late) if late else one


def clocks_ahead(view: RunView, seen: Mapping[str, Presence | None]) -> dict[str, float]:
    """Seconds by which the clocks of hosts are ahead of the file server's; negative: behind.

    A heartbeat and the last line of a journal have the time of their host, and both files that of
    the file server. Two files of a host must agree, since one can be restored or touched. Empty if
    the times of the files mean nothing, as in a copy of the run.
    """
    paths = view.paths
    started: dict[str, float] = {}
    late: dict[str, list[float]] = {}
    for one in seen.values():
        if one is not None and one.started:
            started[one.host] = min(one.started, started.get(one.host, one.started))
            files = ((paths.worker, one.at), (paths.journal, last_line_at(view, one.worker)))
            for path, at in files:
                with suppress(OSError):
                    written = path(one.worker).stat().st_mtime
                    if at is not None:
                        late.setdefault(one.host, []).append(at - written)
    # A delayed write makes a clock look as if it was behind.
    highest = {host: max(found) for host, found in late.items()}
    ahead = {
        host: most
        for host, most in highest.items()
        if sum(one > most - OFF_S for one in late[host]) > 1
    }
    with suppress(OSError):
        created = paths.manifest.stat().st_mtime
        first = min((started[host] - off for host, off in ahead.items()), default=created)
        near = sum(abs(off) < OFF_S for off in ahead.values())
        if first > created - OFF_S and 2 * near >= len(ahead):
            return {host: off for host, off in ahead.items() if abs(off) >= OFF_S}
    return {}


def clocks_off(view: RunView, seen: dict[str, Presence | None], clock: Clock) -> dict[str, float]:
    """Return the seconds by which clocks of hosts are ahead, if a presence shows that one is."""
    lives = [one for one in seen.values() if one is not None]
    with suppress(OSError):
        first, last = view.paths.manifest.stat().st_mtime - OFF_S, clock.wall() + OFF_S
        if any(one.started and (one.started < first or one.at > last) for one in lives):
            return clocks_ahead(view, seen)
    return {}


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
