"""The workers of a run from their start to their end, read from their files and all journals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.results.records import ALIVE, DIED, DRAINED, ENDED, UNKNOWN_END, Death, WorkerLife
from hpc_toolkit.results.status import living_workers

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.results.history import History
    from hpc_toolkit.system.clock import Clock


@dataclass(slots=True)
class _Spent:
    """Seconds from one journal."""

    busy_s: float = 0.0
    runs_s: float = 0.0
    """Seconds of unit runs that were released."""
    in_runs_s: float = 0.0
    """Seconds in items of these unit runs."""


def end_of(name: str, presence: Presence | None, alive: set[str]) -> str:
    """How a worker ended: a value of :attr:`WorkerLife.end`."""
    if presence is None:
        return UNKNOWN_END
    if presence.state == FINISHED:
        return DRAINED if presence.note else ENDED
    return ALIVE if name in alive else DIED


def read_lives(history: History, clock: Clock) -> list[WorkerLife]:
    """Every worker that started, by name; reads all journals, up to the last refresh.

    The clock only tells whether workers of other hosts seem alive.
    """
    alive = living_workers(history.view, clock, history.presences)
    names = sorted(history.presences.keys() | history.view.readers.keys())
    died: dict[str, Death] = {}
    spent = {name: _spent(history, name, died) for name in names}
    return [_life(name, history, spent[name], alive, died.get(name)) for name in names]


def _spent(history: History, worker: str, died: dict[str, Death]) -> _Spent:
    """Sum up one journal; add the deaths of other workers that it records to ``died``."""
    spent, in_run_s = _Spent(), 0.0
    if worker not in history.view.readers:
        return spent
    for line in history.lines(worker):
        record = line.record
        if record["type"] == "release":
            spent.runs_s += record["seconds"]
            spent.in_runs_s += in_run_s
            in_run_s = 0.0
        elif record["type"] == "death":
            death = history.death(line, worker) if record["worker"] != worker else None
            if death is not None and (before := died.setdefault(death.worker, death)).at > death.at:
                died[before.worker] = death
        elif "from" not in record:  # the items of a snapshot ran in another run
            spent.busy_s += record["seconds"]
            in_run_s += record["seconds"]
    return spent


def _life(
    name: str, history: History, spent: _Spent, alive: set[str], died: Death | None
) -> WorkerLife:
    presence, seen = history.presences.get(name), history.seen(name)
    busy_s, load_s = round(spent.busy_s, 6), round(max(0.0, spent.runs_s - spent.in_runs_s), 6)
    end = end_of(name, presence, alive)
    if presence is None:
        return WorkerLife(name=name, end=end, seen=seen, busy_s=busy_s, load_s=load_s, died=died)
    gpus = presence.place.get("gpus")
    return WorkerLife(
        name=name,
        host=presence.host,
        rank=presence.rank,
        job=presence.job,
        cluster=presence.cluster,
        restart=presence.restart,
        cpus=str(presence.place.get("cpus") or ""),
        gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else None,
        started=presence.started,
        seen=seen,
        end=end,
        note=presence.note,
        done=presence.done,
        failed=presence.failed,
        deaths=presence.deaths,
        busy_s=busy_s,
        load_s=load_s,
        died=died,
    )
