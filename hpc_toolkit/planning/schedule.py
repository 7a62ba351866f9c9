"""Schedule units of known durations on workers, in the order in which the queue hands them out.

This is list scheduling: a free worker takes the next unit. The choice follows the queue's
preference (:mod:`hpc_toolkit.queue.affinity`): the loaded group, else the longest group that no
worker has begun, else the group with most work left.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.work import context
from hpc_toolkit.queue.affinity import siblings_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_toolkit.planning.lengths import Lengths
    from hpc_toolkit.planning.repeats import Floats, Kind
    from hpc_toolkit.planning.work import StageWork


@dataclass(frozen=True, slots=True)
class Job:
    key: str
    """The context that it needs, as from :func:`hpc_toolkit.planning.work.context`."""
    seconds: float
    load_s: float
    """Extra seconds if this context is not loaded."""
    count: int
    units: int = 1
    """How many units it joins."""
    holder: str = ""
    """The worker that holds it; "" if it waits."""
    firsts: Sequence[tuple[Kind, float]] = ()
    """The kinds of its items, each with the extra seconds if its worker has done none of the kind
    since it loaded the context."""


@dataclass(frozen=True)
class Phase:
    """Jobs that begin when those of the phase before have ended."""

    jobs: Sequence[Job]
    most_workers: int | None = None
    """The most workers that take part; None: all."""
    wait_s: float = 0.0
    """Seconds from the end of the phase before to its first job."""
    done: Mapping[str, frozenset[Kind]] = field(default_factory=dict)
    """The kinds that each worker has done since its last load."""

    @cached_property
    def order(self) -> _Order:
        """The order of all jobs, which is the same for each number of workers."""
        return _Order(self.jobs)


class Course:
    """The result of a schedule: when every job runs."""

    def __init__(self, spans: Sequence[Floats]) -> None:
        """``spans`` are arrays of the begins, ends and item counts of jobs, a job in each row."""
        self._spans = np.concatenate([*spans, np.zeros((1, 3))])
        self.makespan_s = float(self._spans[:, 1].max())
        """Seconds until the last item ends."""
        self.busy_s = float((self._spans[:, 1] - self._spans[:, 0]).sum())
        """Worker seconds spent on jobs."""

    def share_by(self, limit_s: float) -> float:
        """Return the share of items done by ``limit_s``; the items of a batch end evenly."""
        start, end, count = self._spans.T
        part = np.clip((limit_s - start) / np.maximum(end - start, 1e-9), 0.0, 1.0)
        return float((part * count).sum() / max(count.sum(), 1.0))


def phases_of(
    stage: StageWork, lengths: Lengths, *, going_on: bool, extra: Sequence[int] = ()
) -> list[Phase]:
    """Return the batches of a stage as jobs by round, with one draw of their durations.

    If ``going_on``, the holders of batches go on with them; otherwise all begin anew. The items of
    ``extra`` run once more, at the end of their round.
    """
    # Lists, since reading single elements of arrays is slow.
    batches_s = lengths.batches.tolist()
    more_s = [] if lengths.more_s is None else lengths.more_s.tolist()
    overhead_s = float(np.mean(stage.overheads_s)) if stage.overheads_s else 0.0
    rounds: dict[int, list[Job]] = {}
    for number, batch in enumerate(stage.batches):
        jobs = rounds.setdefault(batch.round, [])
        seconds = batches_s[number]
        held = going_on and bool(batch.holder)
        if held and not batch.loading:
            seconds -= min(batch.age_s, lengths.item_s(batch.first, number, batch))
        load_s = lengths.load_s.get(batch.group, 0.0) * batch.loads
        if held and batch.loading:
            load_s = max(0.0, load_s - batch.age_s)
        firsts: Sequence[tuple[Kind, float]] = ()
        if more_s and lengths.repeats is not None:
            firsts = [(kind, more_s[item]) for kind, item in lengths.repeats.firsts[number]]
        jobs.append(
            Job(
                key=context(stage.name, batch.group),
                seconds=seconds + overhead_s * batch.units,
                load_s=load_s,
                count=batch.count,
                units=batch.units,
                holder=batch.holder if held else "",
                firsts=firsts,
            )
        )
    starts = [batch.first for batch in stage.batches] if extra else []
    for item in extra:
        group = stage.group_of(stage.left[item])
        load_s = lengths.load_s.get(group, 0.0)
        number = bisect_right(starts, item) - 1
        batch = stage.batches[number]
        seconds = lengths.item_s(item, number, batch) + overhead_s
        rounds[batch.round].append(Job(context(stage.name, group), seconds, load_s, 0))
    done = lengths.repeats.done if lengths.repeats is not None and going_on else {}
    return [
        Phase(jobs, stage.most_workers, stage.between_s if number else 0.0, done)
        for number, jobs in rounds.items()
    ]


def schedule(phases: Sequence[Phase], workers: int | dict[str, str]) -> Course:
    """Hand out the jobs of each phase in the order of the queue.

    ``workers`` is the number of workers that begin now; or the living workers with the context that
    each has loaded, which go on with the jobs that they hold.
    """
    names = {str(n): "" for n in range(workers)} if isinstance(workers, int) else workers
    hands = {name: _Hand(key) for name, key in names.items()}
    for phase in phases:
        for name, kinds in phase.done.items():
            if name in hands:
                hands[name].done |= kinds
    spans: list[Floats] = []
    ended = 0.0
    for phase in phases:
        spans.append(_hand_out(phase, hands, ended + phase.wait_s))
        ended = float(spans[-1][:, 1].max(initial=ended + phase.wait_s))
    return Course(spans)


@dataclass(slots=True)
class _Hand:
    """A worker."""

    loaded: str
    done: set[Kind] = field(default_factory=set)
    """The kinds that it has done since it loaded this context."""

    def takes(self, job: Job) -> float:
        """Return the seconds that this worker takes for a job, which it does."""
        seconds = job.seconds
        if job.key != self.loaded:
            seconds += job.load_s
            self.loaded, self.done = job.key, set()
        for kind, more_s in job.firsts:
            if kind not in self.done:
                seconds += more_s
                self.done.add(kind)
        return seconds


def _hand_out(phase: Phase, hands: dict[str, _Hand], begin: float) -> Floats:
    """Return begin, end and item count of each job, and update the workers."""
    held: dict[str, Job] = {}
    rest = []
    for one in phase.jobs:
        if one.holder in hands and one.holder not in held:
            held[one.holder] = one
        else:
            rest.append(one)
    order = _Order(rest) if held else phase.order
    spans: list[tuple[float, float, int]] = []
    # A worker that holds a job ends it, even if the search keeps fewer workers busy from now on.
    most = max(len(held), phase.most_workers or len(hands))
    others = (name for name in hands if name not in held)
    busy = [hands[name] for name in [*held, *islice(others, most - len(held))]]
    for hand, own in zip(busy, held.values(), strict=False):
        spans.append((begin, begin + hand.takes(own), own.count))
    free = [(end, number) for number, (_, end, _) in enumerate(spans)]
    free += [(begin, number) for number in range(len(held), len(busy))]
    heapq.heapify(free)
    if free and order.is_fixed_for(busy):
        found = _in_order(order, busy, free)
    else:
        found = _by_preference(order, busy, free)
    return np.concatenate([np.array(spans, dtype=np.float64).reshape(-1, 3), found])


def _in_order(order: _Order, busy: Sequence[_Hand], free: list[tuple[float, int]]) -> Floats:
    """Hand out jobs whose order does not depend on what the free worker has loaded."""
    loads_s, begins, ends = order.loads_s, [], []
    # In several groups of one job, each job is loaded, which its seconds here contain.
    cold = {n for n, hand in enumerate(busy) if loads_s and hand.loaded not in order.groups}
    last: dict[int, int] = {}
    for number, seconds in enumerate(order.seconds):
        at, worker = free[0]
        end = at + seconds
        if worker in cold:
            cold.remove(worker)
            end = at + (seconds + loads_s[number])
        begins.append(at)
        ends.append(end)
        last[worker] = number
        heapq.heapreplace(free, (end, worker))
    for worker, number in last.items():
        busy[worker].takes(order.jobs[number])
    return np.column_stack([begins, ends, order.counts])


def _by_preference(order: _Order, busy: Sequence[_Hand], free: list[tuple[float, int]]) -> Floats:
    """Hand out jobs of the group that a free worker has loaded, or of the next group."""
    groups = {key: jobs[::-1] for key, jobs in order.groups.items()}
    left, fresh = dict(order.left), deque(order.keys)
    spans: list[tuple[float, float, int]] = []
    while free and groups:
        at, worker = free[0]
        hand = busy[worker]
        key = hand.loaded
        if key not in groups:
            while fresh and len(groups.get(fresh[0], ())) < len(order.groups[fresh[0]]):
                fresh.popleft()  # another worker has begun it
            key = fresh.popleft() if fresh else max(groups, key=left.__getitem__)
        job = groups[key].pop()
        if groups[key]:
            left[key] -= job.seconds
        else:
            del groups[key]
        # Most jobs are of the loaded group, so this skips a call.
        seconds = job.seconds if key == hand.loaded and not job.firsts else hand.takes(job)
        spans.append((at, at + seconds, job.count))
        heapq.heapreplace(free, (at + seconds, worker))
    return np.array(spans, dtype=np.float64).reshape(-1, 3)


class _Order:
    """The jobs of one phase by group, and the order in which groups are begun."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.groups: dict[str, list[Job]] = {}
        for job in jobs:
            self.groups.setdefault(job.key, []).append(job)
        self.left = {key: sum(job.seconds for job in of) for key, of in self.groups.items()}
        items = {key: sum(job.count for job in of) for key, of in self.groups.items()}
        kin = {key: siblings_key(key) for key in self.groups}
        totals: dict[str | None, tuple[float, float]] = {}
        for key, count in items.items():
            seconds, siblings = totals.get(kin[key], (0.0, 1e-9))
            totals[kin[key]] = (seconds + self.left[key], siblings + count)

        def weight(key: str) -> float:
            """Like the queue: seconds per item of the sibling groups, times the group's items."""
            seconds, siblings = totals[kin[key]]
            return seconds / siblings * items[key]

        self.keys = sorted(self.groups, key=lambda key: -weight(key))
        self.jobs = [job for key in self.keys for job in self.groups[key]]
        self.counts = [job.count for job in self.jobs]
        alone = len(self.groups) == len(self.jobs)
        self.seconds = [job.seconds + (job.load_s if alone else 0.0) for job in self.jobs]
        self.loads_s = [] if alone else [job.load_s for job in self.jobs]
        """Seconds to load, where the loads are not in :attr:`seconds`."""
        self._fixed = (alone or len(self.groups) == 1) and not any(job.firsts for job in jobs)

    def is_fixed_for(self, hands: Sequence[_Hand]) -> bool:
        """Return whether all jobs of one group, or groups of one job that none of the workers has
        loaded, are handed out in the order of :attr:`jobs`.
        """
        loaded = not self.loads_s and any(hand.loaded in self.groups for hand in hands)
        return self._fixed and not loaded
