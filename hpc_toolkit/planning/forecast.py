"""Forecast the time of the rest of a run on N workers.

The durations of the items left are drawn many times (:mod:`hpc_toolkit.planning.work`). Each
draw is scheduled as the queue hands out units: a free worker takes the next unit of the group that
it has loaded, else of the longest group that no worker has begun, else of the group with most work
left. The intervals are those of the draws.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.work import (
    Chance,
    Draw,
    Floats,
    Ints,
    LearnedDurations,
    StageWork,
    Work,
    context,
)

SURE = 0.95
"""Probability with which a recommended time limit or number of nodes must be enough."""
DRAWS = 100
"""Draws of each forecast; fewer for a run with very many units."""
_FEWEST_DRAWS = 20
_MOST_JOBS = 400_000
"""The most units times draws to schedule for one number of workers."""
_MANY = 64
"""With more batches for each worker, they are shared evenly instead of scheduled one by one."""
START_S = 120.0
"""Seconds until the ranks of a job work: its prologue, imports, the first claims."""
_MOST_LOST = 0.9
"""Largest share of a job that is lost at its end. Without this bound, a draw in which items are
longer than jobs would never finish."""
_DRIFT = 0.05
"""How much everything together may run slower or faster from now on: other jobs on the network, a
warmer node, and effects that the model does not know. Standard deviation of a logarithm."""
_LEFT_OUT = 0.03
"""Share of the draws below an interval, and above it. Intervals are to hold in 9 of 10 cases, which
are not all as the model assumes."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and bounds that hold in 9 of 10 cases."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Floats | Sequence[float]) -> Interval:
        found = np.quantile(values, (_LEFT_OUT, 0.5, 1 - _LEFT_OUT))
        return cls(*(float(value) for value in found))

    def times(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.median * factor, self.high * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The rest of a run on one number of workers, without waiting for Slurm."""

    workers: int
    time_s: Interval
    """Seconds until the last item has a result."""
    sure_s: float
    """Seconds within which the last item has a result in 19 of 20 cases."""
    draws: int
    jobs: Interval | None = None
    """Number of jobs in a row under the time limit of one job; None without a limit, or if the
    limit leaves too little room for items."""
    sure_jobs: int = 0
    """Number of jobs in a row that is enough in 19 of 20 cases; 0 where :attr:`jobs` is None."""
    within: float | None = None
    """Probability that all is done within the given time; None without a given time."""


@dataclass(frozen=True, slots=True)
class Guess:
    """The user's guess of durations before any item has ended."""

    seconds_per_item: float
    factor: float = 1.5
    """In 9 of 10 cases the true means are within this factor, up or down; at least 1."""
    spread: float = 0.5
    """How much items differ: standard deviation of the logarithms of their seconds."""


class GuessedDurations:
    def __init__(self, stage: StageWork, guess: Guess) -> None:
        self._guess = guess
        self._counts = np.array([batch.count for batch in stage.batches])

    def draw(self, chance: Chance, drift: float) -> Draw:
        """Draw each batch as a sum of log-normal items, which is nearly log-normal itself: a list
        may have millions of items.
        """
        guess, counts = self._guess, self._counts
        off = drift * np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645))
        item_s = float(guess.seconds_per_item * off)
        variance = math.expm1(guess.spread**2)
        sd = np.sqrt(np.log1p(variance / counts))
        batches = counts * item_s * np.exp(chance.normal(-(sd**2) / 2, sd))
        count = int(counts.sum())
        # The expected maximum of that number of log-normal items, approximately.
        sigmas = math.sqrt(2.0 * math.log(count))
        longest_s = item_s * math.exp(guess.spread * (sigmas - guess.spread / 2))
        squares = count * item_s**2 * (1.0 + variance)
        return Draw(batches, np.zeros(len(batches)), longest_s, float(batches.sum()), squares)


class Forecaster:
    """Forecasts for one run, all of them from the same draws: equal calls have equal answers.

    There must be at least one item left. The guess is for stages of which no item has ended.
    """

    def __init__(
        self, work: Work, guess: Guess | None = None, *, draws: int = DRAWS, seed: int = 0
    ) -> None:
        chance = np.random.default_rng(seed)
        models = [_model(stage, guess) for stage in work.stages]
        jobs = sum(len(stage.batches) for stage in work.stages)
        draws = max(min(draws, _FEWEST_DRAWS), min(draws, _MOST_JOBS // jobs))
        self._work = work
        self.keys = sorted({one.kind_by for one in work.stages if one.kind_by and one.seen})
        """Keys of items that predict how long the items take."""
        self.guessed = [stage.name for stage in work.stages if not stage.seen]
        """Stages for which nothing but the guess is known."""
        self.stages = [stage.name for stage in work.stages]
        # Durations of single items are not kept: those of a million would fill the memory.
        self._draws: list[list[Draw]] = []
        for _ in range(draws):
            drift = float(np.exp(chance.normal(0.0, _DRIFT)))
            self._draws.append([model.draw(chance, drift) for model in models])
        self._expected_s = [
            np.mean([one.batches for one in drawn], axis=0).tolist()
            for drawn in zip(*self._draws, strict=True)
        ]
        self._makespans: dict[int | None, Floats] = {}
        """By number of workers: the seconds of each draw until the last item ends."""
        facts = np.array([_facts(work.left, draw) for draw in self._draws]).T
        mean_s, self._longest_s, self._cut_s, largest_s, useful, self._load_s = facts
        self.item_s = Interval.of(mean_s)
        """Mean seconds of the items left."""
        self.longest_s = float(np.quantile(self._longest_s, SURE))
        """Seconds that the longest item left exceeds in 1 of 20 cases."""
        self.largest_s = float(np.median(largest_s))
        """Seconds that one worker takes for the largest unit: no number of workers is faster."""
        self.useful_workers = max(1, round(float(np.median(useful))))
        """With more workers than this, the largest unit alone determines the time."""
        self.load_s = float(self._load_s.mean())

    def forecast(
        self, workers: int | None, *, within_s: float | None = None, limit_s: float | None = None
    ) -> Forecast:
        """Forecast the work left for workers that begin now and replace the running ones.

        Without a number, the living workers go on with their batches. ``limit_s`` is the time limit
        of one job: further jobs follow until all is done.
        """
        hands = self._work.workers
        if workers is not None:
            hands = dict.fromkeys(map(str, range(workers)), "")
        if workers not in self._makespans:
            living = hands if workers is None else ()
            stages = enumerate(zip(self._work.stages, self._expected_s, strict=True))
            phases = [
                phase
                for number, (stage, expected_s) in stages
                for phase in _phases(stage, number, expected_s, living)
            ]
            makespans = [_Schedule(phases, draw, hands).makespan_s for draw in self._draws]
            self._makespans[workers] = np.array(makespans)
        times, jobs = self._makespans[workers], None
        if limit_s is not None and self.fits(limit_s):
            # Each job but the last ends while its workers are in the middle of items, and the next
            # one must start and load again.
            lost_s = np.minimum(self._cut_s + self._load_s + START_S, _MOST_LOST * limit_s)
            ends = np.ceil(np.maximum(times - limit_s, 0.0) / (limit_s - lost_s))
            times, jobs = times + ends * lost_s, ends + 1
        return Forecast(
            workers=len(hands),
            time_s=Interval.of(times),
            sure_s=float(np.quantile(times, SURE)),
            draws=len(times),
            jobs=None if jobs is None else Interval.of(jobs),
            sure_jobs=0 if jobs is None else math.ceil(np.quantile(jobs, SURE)),
            within=None if within_s is None else float(np.mean(times <= within_s)),
        )

    def fits(self, limit_s: float) -> bool:
        """Return whether a job of this limit probably has room for the longest item, and for more
        than it loses at its end.
        """
        needed = np.maximum(self._longest_s, self._cut_s + self._load_s + START_S)
        return float(np.median(needed)) <= limit_s


def _model(stage: StageWork, guess: Guess | None) -> LearnedDurations | GuessedDurations:
    if stage.seen:
        return LearnedDurations(stage)
    if guess is None:
        message = f"no item of {stage.name} has ended yet, so durations are unknown"
        hint = "give an estimate such as --item-time 30s, or wait for the first results"
        raise ConfigError(message, hint=hint)
    return GuessedDurations(stage, guess)


def _facts(items: int, draw: list[Draw]) -> tuple[float, ...]:
    """Return facts of one draw: mean seconds of an item, of the longest item, and what a worker
    loses when its job ends; seconds of the largest unit, the workers beyond which it alone
    determines the time, and mean seconds to load a batch.
    """
    items_s = sum(one.items_s for one in draw)
    largest_s = max(one.batches.max() for one in draw)
    return (
        items_s / items,
        max(one.longest_s for one in draw),
        # At a random moment, a worker is more likely to be in a long item than in a short one.
        sum(one.squares for one in draw) / (2 * items_s),
        largest_s,
        sum(one.batches.sum() for one in draw) / max(largest_s, 1e-9),
        float(np.concatenate([one.load_s for one in draw]).mean()),
    )


@dataclass(frozen=True, slots=True)
class _Phase:
    """A round of a stage: its batches begin when those of the phase before have ended."""

    stage: StageWork
    number: int
    held: dict[str, int]
    """The number of the batch that each worker holds."""
    waiting: dict[str, list[int]]
    """The numbers of the waiting batches by context, the last one first; the longest context is
    last."""
    left_s: dict[str, float]
    """The expected seconds of these batches, by context."""
    numbers: Ints
    """The numbers of all of them."""
    firsts: Ints
    """The first one of each context."""


def _phases(
    stage: StageWork, number: int, expected_s: list[float], living: Collection[str]
) -> Iterator[_Phase]:
    """Yield the phases of a stage, in which living workers keep the batches that they hold."""
    rounds: dict[int, list[int]] = {}
    for batch_number, batch in enumerate(stage.batches):
        rounds.setdefault(batch.round, []).append(batch_number)
    for numbers in rounds.values():
        held: dict[str, int] = {}
        waiting: dict[str, list[int]] = {}
        left_s: dict[str, float] = {}
        for one in numbers:
            batch = stage.batches[one]
            if batch.holder in living and batch.holder not in held:
                held[batch.holder] = one
                continue
            key = context(stage.name, batch.group)
            waiting.setdefault(key, []).append(one)
            left_s[key] = left_s.get(key, 0.0) + expected_s[one]
        order = {key: waiting[key][::-1] for key in sorted(waiting, key=left_s.__getitem__)}
        rest = np.array([one for some in order.values() for one in some], dtype=np.int64)
        firsts = np.array([some[-1] for some in order.values()], dtype=np.int64)
        yield _Phase(stage, number, held, order, left_s, rest, firsts)


class _Schedule:
    """One schedule of all batches."""

    def __init__(
        self, phases: Sequence[_Phase], draws: Sequence[Draw], workers: dict[str, str]
    ) -> None:
        """Hand out the batches of each phase to workers, given with their loaded contexts."""
        self._loaded = list(workers.values())
        self.makespan_s = 0.0
        """Seconds until the last item ends."""
        for phase in phases:
            draw = draws[phase.number]
            ends, free = self._go_on(phase, draw, list(workers), self.makespan_s)
            some = self._shared if len(phase.numbers) > _MANY * len(free) else self._handed_out
            self.makespan_s = max((*ends, *some(phase, draw, free)), default=self.makespan_s)

    def _go_on(
        self, phase: _Phase, draw: Draw, workers: Sequence[str], begin: float
    ) -> tuple[list[float], list[tuple[float, int]]]:
        """Return the ends of the batches that workers hold, and when each worker is free."""
        ends, free, idle = [], [], []
        for hand, worker in enumerate(workers):
            if worker not in phase.held:
                idle.append((begin, hand))
                continue
            number = phase.held[worker]
            batch, seconds = phase.stage.batches[number], float(draw.batches[number])
            key = context(phase.stage.name, batch.group)
            load = float(draw.load_s[number]) if self._loaded[hand] != key else 0.0
            spent_s = min(batch.age_s, load if batch.loading else seconds)
            ends.append(begin + seconds + load - spent_s)
            free.append((ends[-1], hand))
            self._loaded[hand] = key
        # A worker finishes its batch even if the search keeps fewer workers busy from now on.
        most = max(len(free), phase.stage.most_workers or len(workers))
        return ends, free + idle[: most - len(free)]

    @staticmethod
    def _shared(phase: _Phase, draw: Draw, free: list[tuple[float, int]]) -> list[float]:
        """Share very many batches evenly, and return when all have ended: list scheduling gives the
        same within 1 %.
        """
        seconds, load_s = draw.batches[phase.numbers], draw.load_s[phase.firsts]
        # Each group is loaded once, and each worker loads one.
        loads_s = load_s.sum() + max(0, len(free) - len(load_s)) * load_s.mean()
        work_s = float(sum(at for at, _ in free) + seconds.sum() + loads_s)
        # At the end, a worker waits for half a batch of another one on average.
        end = work_s / len(free) + float(seconds.mean()) / 2
        return [end, *(at for at, _ in free)]

    def _handed_out(
        self, phase: _Phase, draw: Draw, free: list[tuple[float, int]]
    ) -> Iterator[float]:
        """Give the worker that is free first the next batch, and yield when each batch ends."""
        loaded = self._loaded
        # Lists, since reading single elements of arrays is slow.
        seconds, load_s = draw.batches.tolist(), draw.load_s.tolist()
        waiting = {key: numbers.copy() for key, numbers in phase.waiting.items()}
        left_s, fresh = phase.left_s.copy(), list(waiting)
        begun = set(loaded)
        heapq.heapify(free)
        while free and waiting:
            at, hand = free[0]
            key = loaded[hand]
            if key not in waiting:
                while fresh and fresh[-1] in begun:
                    fresh.pop()
                key = fresh.pop() if fresh else max(waiting, key=left_s.__getitem__)
                begun.add(key)
            number = waiting[key].pop()
            end = at + seconds[number] + (load_s[number] if key != loaded[hand] else 0.0)
            loaded[hand] = key
            left_s[key] -= seconds[number]
            if not waiting[key]:
                del waiting[key]
            heapq.heapreplace(free, (end, hand))
            yield end
