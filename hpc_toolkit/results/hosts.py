"""The hosts of a run: their workers, how busy they are, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import DRAINING, FINISHED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView

ALIVE, DRAINS, ENDED, DIED = "alive", "draining", "ended", "died"


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """A worker at one moment."""

    name: str
    state: str
    """``alive``, ``draining``, ``ended`` or ``died``."""
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


@dataclass(frozen=True, slots=True)
class HostLine:
    """A host and its workers, by name."""

    host: str
    workers: tuple[WorkerLine, ...]

    @property
    def alive(self) -> int:
        return sum(one.state in (ALIVE, DRAINS) for one in self.workers)

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
    drains = DRAINS if one.state == DRAINING else ALIVE
    return WorkerLine(
        name=one.worker,
        state=drains if is_alive else DIED,
        is_busy=is_busy,
        rate_per_s=done / seconds if is_alive and seconds > 0 else 0.0,
        done=one.done,
        failed=one.failed,
        deaths=one.deaths,
        note=one.note,
    )
