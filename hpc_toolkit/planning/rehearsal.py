"""Measure by simulation what the queue's own code costs beyond list scheduling.

A simulation runs the code of claims, choice and journals on a virtual clock. This is too slow for
hundreds of draws, so list scheduling handles all draws, and a few simulated draws correct it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.schedule import Job, schedule
from hpc_toolkit.planning.simulation.cluster import simulate
from hpc_toolkit.planning.simulation.scenario import Group, Scenario
from hpc_toolkit.planning.work import context
from hpc_toolkit.queue.units import plan_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.lengths import Lengths
    from hpc_toolkit.planning.work import StageWork

MOST_ITEMS = 8_000
"""Runs with more items are not simulated."""
MOST_PER_WORKER = 500
"""Runs with more items per worker are not simulated: simulation and list scheduling differ only at
the end, which is then a small part."""
MOST_WORKERS = 64
"""More workers are not simulated: they need too many open files, and minutes."""
_TICKS = 4_000
"""Approximate number of ticks of a simulation, to limit its wall-clock time."""
_LONGEST_TICK_S = 40.0
"""Longest tick, well below a lease."""
_BOUNDS = (0.95, 1.5)
"""Bounds of the ratio. A ratio beyond them is chance: the two made different choices."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of the simulations for one number of workers."""

    ratio: float
    """Median ratio of the simulated makespan to the makespan of list scheduling."""
    simulated: int
    """Number of simulated draws; 0: not simulated, and the ratio is 1."""


def rehearse(
    stages: Sequence[StageWork], draws: Sequence[Sequence[Lengths]], workers: int
) -> Rehearsal:
    """Simulate draws, each with the durations of every stage; a large run gets fewer draws.

    Args:
        stages: the work left, all of which begins anew.
        draws: durations by draw and stage; empty to skip the simulation.
        workers: the number of workers, which all begin at once.
    """
    items = sum(len(stage.left) for stage in stages)
    large = items > min(MOST_ITEMS, MOST_PER_WORKER * workers) or workers > MOST_WORKERS
    if large or not draws:
        return Rehearsal(1.0, 0)
    count = max(1, min(len(draws), 2_000 // items))
    ratios = [_ratio(stages, lengths, workers) for lengths in draws[:count]]
    return Rehearsal(float(np.clip(np.median(ratios), *_BOUNDS)), count)


def _ratio(stages: Sequence[StageWork], lengths: Sequence[Lengths], workers: int) -> float:
    groups = tuple(_groups(stages, lengths))
    total_s = sum(group.seconds for group in groups)
    tick_s = min(max(1.0, total_s / _TICKS), _LONGEST_TICK_S)
    if total_s <= 0:
        return 1.0
    scenario = Scenario(groups=groups, workers=workers, tick_s=tick_s)
    listed = schedule([_jobs(groups)], workers).makespan_s
    return simulate(scenario).makespan_s / listed


def _groups(stages: Sequence[StageWork], lengths: Sequence[Lengths]) -> list[Group]:
    """Return the items by group with the durations of one draw, and each group's loading time."""
    found: dict[str, list[float]] = {}
    load_s: dict[str, float] = {}
    for stage, drawn in zip(stages, lengths, strict=True):
        for item, seconds in zip(stage.left, drawn.seconds, strict=True):
            group = stage.group_of(item)
            key = context(stage.name, group)
            found.setdefault(key, []).append(float(seconds))
            first_s = (drawn.first - 1.0) * float(seconds)
            load_s.setdefault(key, max(0.0, drawn.load_s.get(group, 0.0) + first_s))
    return [
        Group(len(seconds), load_s[key], 0.0, 0.0, tuple(seconds)) for key, seconds in found.items()
    ]


def _jobs(groups: Sequence[Group]) -> list[Job]:
    """Return as jobs the units into which the simulation cuts the groups."""
    of = [number for number, group in enumerate(groups) for _ in range(group.items)]
    seconds = np.concatenate([[0.0], np.cumsum([s for group in groups for s in group.items_s])])
    return [
        Job(
            key=f"items/{of[first]}",
            seconds=float(seconds[first + count] - seconds[first]),
            load_s=groups[of[first]].load_s,
            count=count,
        )
        for first, count in plan_units(of, len(of))
    ]
