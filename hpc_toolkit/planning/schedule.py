"""Schedule units of known durations on workers, in the order in which the queue hands them out.

This is list scheduling: a free worker takes the next unit. The choice follows the queue's
preference (:mod:`hpc_toolkit.queue.affinity`): the loaded group, else the longest group that no
worker has begun, else the group with most work left. A simulation runs the code of claims, choice
and journals on a virtual clock. This is too slow for hundreds of draws, so list scheduling handles
all draws, and a few simulated draws measure what the queue's own code costs beyond it.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.planning.simulation.cluster import simulate
from hpc_toolkit.planning.simulation.scenario import Group, Scenario
from hpc_toolkit.planning.work import context
from hpc_toolkit.queue.affinity import siblings_key
from hpc_toolkit.queue.units import plan_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.lengths import Lengths
    from hpc_toolkit.planning.work import StageWork

    Floats = np.ndarray[Any, np.dtype[np.float64]]

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
class Job:
    key: str
    """The context that it needs, as from :func:`hpc_toolkit.planning.work.context`."""
    seconds: float
    load_s: float
    """Extra seconds if this context is not loaded."""
    count: int
    holder: str = ""
    """The worker that holds it; "" if it waits."""
    loading: bool = False


class Course:
    """The result of a schedule: when every job runs."""

    def __init__(self, spans: list[tuple[float, float, int]], workers: int) -> None:
        self._spans = np.array(spans or [(0.0, 0.0, 0)], dtype=np.float64)
        self.makespan_s = float(self._spans[:, 1].max())
        """Seconds until the last item ends."""
        self.busy_s = float((self._spans[:, 1] - self._spans[:, 0]).sum())
        """Worker seconds spent on jobs."""
        self.workers = workers

    def share_by(self, limit_s: float) -> float:
        """Return the share of items done by ``limit_s``; the items of a batch end evenly."""
        start, end, count = self._spans.T
        part = np.clip((limit_s - start) / np.maximum(end - start, 1e-9), 0.0, 1.0)
        return float((part * count).sum() / max(count.sum(), 1.0))


def jobs_of(
    stage: StageWork, lengths: Lengths, *, going_on: bool, extra: Sequence[int] = ()
) -> list[Job]:
    """Return the batches of a stage as jobs, with one draw of their durations.

    If ``going_on``, the holders of batches go on with them; otherwise all begin anew. The items of
    ``extra`` run once more, at the end.
    """
    ends = np.concatenate([[0.0], np.cumsum(lengths.seconds)])
    overhead_s = float(np.mean(stage.overheads_s)) if stage.overheads_s else 0.0
    jobs = []
    for batch in stage.batches:
        seconds = float(ends[batch.first + batch.count] - ends[batch.first])
        held = going_on and bool(batch.holder)
        if held and not batch.loading:
            seconds -= min(batch.age_s, float(lengths.seconds[batch.first]))
        load_s = lengths.load_s.get(batch.group, 0.0) * batch.loads
        load_s += (lengths.first - 1.0) * float(lengths.seconds[batch.first])
        if held and batch.loading:
            load_s = max(0.0, load_s - batch.age_s)
        jobs.append(
            Job(
                key=context(stage.name, batch.group),
                seconds=seconds + overhead_s,
                load_s=max(0.0, load_s),
                count=batch.count,
                holder=batch.holder if held else "",
                loading=held and batch.loading,
            )
        )
    for item in extra:
        group = stage.group_of(stage.left[item])
        load_s = lengths.load_s.get(group, 0.0)
        key = context(stage.name, group)
        jobs.append(Job(key, float(lengths.seconds[item]) + overhead_s, load_s, 0))
    return jobs


def schedule(stages: Sequence[Sequence[Job]], workers: int | dict[str, str]) -> Course:
    """Hand out the jobs of the stages, earlier stages first, each in the order of the queue.

    ``workers`` is the number of workers that begin now; or the living workers with the context that
    each has loaded, which go on with the jobs that they hold.
    """
    names: dict[str, str] = (
        {str(n): "" for n in range(workers)} if isinstance(workers, int) else workers
    )
    held: dict[str, Job] = {}
    waiting = []
    for jobs in stages:
        rest = []
        for one in jobs:
            if one.holder in names and one.holder not in held:
                held[one.holder] = one
            else:
                rest.append(one)
        waiting.append(_Waiting(rest))
    spans: list[tuple[float, float, int]] = []
    free: list[tuple[float, int, str]] = []
    for number, (name, loaded) in enumerate(names.items()):
        at = 0.0
        if name in held:
            own = held[name]
            at = own.seconds + (own.load_s if own.loading else 0.0)
            spans.append((0.0, at, own.count))
        heapq.heappush(free, (at, number, held[name].key if name in held else loaded))
    while free:
        at, number, loaded = heapq.heappop(free)
        taken = next((job for one in waiting if (job := one.take(loaded))), None)
        if taken is not None:
            end = at + taken.seconds + (taken.load_s if taken.key != loaded else 0.0)
            spans.append((at, end, taken.count))
            heapq.heappush(free, (end, number, taken.key))
    return Course(spans, len(names))


class _Waiting:
    """The jobs of one stage that no worker has taken."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._groups: dict[str, deque[Job]] = {}
        for job in jobs:
            self._groups.setdefault(job.key, deque()).append(job)
        self._left = {key: sum(job.seconds for job in of) for key, of in self._groups.items()}
        # Like the queue: seconds per item of the sibling groups, times the items of the group.
        totals: dict[str | None, list[float]] = {}
        for key, of in self._groups.items():
            total = totals.setdefault(siblings_key(key), [0.0, 1e-9])
            total[0] += self._left[key]
            total[1] += sum(job.count for job in of)
        weight = {
            key: totals[siblings_key(key)][0]
            / totals[siblings_key(key)][1]
            * sum(job.count for job in of)
            for key, of in self._groups.items()
        }
        self._fresh = deque(sorted(self._groups, key=lambda key: -weight[key]))
        self._begun: set[str] = set()

    def take(self, loaded: str) -> Job | None:
        """Remove and return the next job for a worker; None if none is left."""
        if not self._groups:
            return None
        key = loaded if loaded in self._groups else self._next()
        self._begun.add(key)
        of = self._groups[key]
        job = of.popleft()
        self._left[key] -= job.seconds
        if not of:
            del self._groups[key]
        return job

    def _next(self) -> str:
        while self._fresh:
            key = self._fresh.popleft()
            if key in self._groups and key not in self._begun:
                return key
        return max(self._groups, key=lambda key: self._left[key])


def rehearse(
    stages: Sequence[StageWork], draws: Sequence[Sequence[Lengths]], workers: int
) -> tuple[float, int]:
    """Simulate draws, each with the durations of every stage; a large run gets fewer draws.

    Return the median ratio of the simulated makespan to the makespan of list scheduling, and the
    number of simulated draws; (1, 0) if nothing is simulated. All of the work begins anew, and all
    workers begin at once.
    """
    items = sum(len(stage.left) for stage in stages)
    large = items > min(MOST_ITEMS, MOST_PER_WORKER * workers) or workers > MOST_WORKERS
    if large or not draws:
        return 1.0, 0
    count = max(1, min(len(draws), 2_000 // items))
    ratios = [_ratio(stages, lengths, workers) for lengths in draws[:count]]
    return float(np.clip(np.median(ratios), *_BOUNDS)), count


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
    found: dict[str, list[float]] = {}
    load_s: dict[str, float] = {}
    for stage, drawn in zip(stages, lengths, strict=True):
        for item, seconds in zip(stage.left, drawn.seconds, strict=True):
            group = stage.group_of(item)
            key = context(stage.name, group)
            found.setdefault(key, []).append(float(seconds))
            first_s = (drawn.first - 1.0) * float(seconds)
            load_s.setdefault(key, max(0.0, drawn.load_s.get(group, 0.0) + first_s))
    return [Group(tuple(seconds), load_s[key]) for key, seconds in found.items()]


def _jobs(groups: Sequence[Group]) -> list[Job]:
    """Return as jobs the units into which the simulation cuts the groups."""
    of = [number for number, group in enumerate(groups) for _ in group.items_s]
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
