"""Forecast the time of the rest of a run on N workers, as a distribution over drawn durations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.lengths import GuessedLengths, LearnedLengths
from hpc_toolkit.planning.schedule import phases_of, schedule
from hpc_toolkit.planning.work import SURE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.lengths import Guess, Lengths
    from hpc_toolkit.planning.repeats import Floats
    from hpc_toolkit.planning.schedule import Course, Phase
    from hpc_toolkit.planning.work import StageWork, Work


DRAWS = 200
"""Draws of each forecast; fewer for a run with very many units."""
_FEWEST_DRAWS = 50
_MOST_JOBS = 400_000
"""The most units times draws to schedule for one number of workers."""
START_S = 120.0
"""Seconds until the ranks of a job work: its prologue, imports, the first claims."""
_ENDS = 1_000
"""Ends of jobs that are drawn; more jobs in a row repeat them."""
_MOST_LOST = 0.9
"""Largest share of a job that is lost at its end. Without this bound, a draw in which items are
longer than jobs would never finish."""
_DRIFT = 0.05
"""How much everything together may run slower or faster from now on: other jobs on the network, a
warmer node, and effects that the model does not know. Standard deviation of a logarithm."""
_LEFT_OUT = 0.03
"""Share of the draws below an interval, and above it. Intervals are to hold in 9 of 10 cases, which
are not all as the model assumes. With 0.05 they held in 129 of 140 simulated runs in which a few
items took 8 times as long, with 0.03 in 135."""
_SHARES = (_LEFT_OUT, 0.5, 1 - _LEFT_OUT)


@dataclass(frozen=True, slots=True)
class Interval:
    """A median, and bounds that hold in 9 of 10 cases."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Floats | Sequence[float]) -> Interval:
        return cls(*(float(value) for value in np.quantile(values, _SHARES)))

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
    worker_s: Interval
    """Worker seconds of work and loading, without waiting at the end."""
    draws: int
    jobs: Interval | None = None
    """Number of jobs in a row under the time limit of one job; None without a limit, or if the
    limit leaves too little room for items."""
    sure_jobs: int = 0
    """Number of jobs in a row that is enough in 19 of 20 cases; 0 where :attr:`jobs` is None."""
    lost_s: float = 0.0
    """Mean seconds of :attr:`time_s` that are lost at the ends of these jobs."""
    within: float | None = None
    """Probability that all is done within the given time; None without a given time."""
    share: Interval | None = None
    """Share of the items left that are done within the given time."""


class Forecaster:
    """Forecasts for one run, all of them from the same draws: equal calls have equal answers.

    There must be at least one item left. The guess is for stages of which no item has ended.
    """

    def __init__(
        self,
        work: Work,
        guess: Guess | None = None,
        *,
        draws: int = DRAWS,
        seed: int = 0,
        anew: bool = True,
    ) -> None:
        """Draw the durations of the work left.

        Without ``anew``, only forecasts for the living workers can be made, in half the time.
        """
        chance = np.random.default_rng(seed)
        models = [_model(stage, guess) for stage in work.stages]
        jobs = sum(len(stage.batches) for stage in work.stages)
        self._seed = seed
        self._facts: list[_Facts] = []
        self._draws = max(min(draws, _FEWEST_DRAWS), min(draws, _MOST_JOBS // max(jobs, 1)))
        self._work = work
        self.keys = sorted({key for model in models for key in model.keys})
        """Keys of items that were found to predict how long the items take."""
        self.guessed = [stage.name for stage in work.stages if not stage.seen]
        """Stages for which nothing but the guess is known."""
        self.stages = [stage.name for stage in work.stages]
        self._known: dict[int | None, list[Course]] = {}
        self._anew: list[list[Phase]] = []
        for _ in range(self._draws):
            drift = float(np.exp(chance.normal(0.0, _DRIFT)))
            lengths = [model.draw(chance).times(drift) for model in models]
            again = [_again(stage, chance) for stage in work.stages]
            # The durations themselves are not kept: those of a million items would fill the memory.
            phases: list[Phase] = []
            if work.workers:
                phases = _phases(work, lengths, again, going_on=True)
                self._known.setdefault(None, []).append(schedule(phases, work.workers))
            if anew:
                phases = _phases(work, lengths, again, going_on=False)
                self._anew.append(phases)
            self._facts.append(_facts(work.left, lengths, phases))
        self.item_s = Interval.of(self._each("mean_s"))
        """Mean seconds of the items left."""
        self.longest_s = float(np.quantile(self._each("longest_s"), SURE))
        """Seconds that the longest item left exceeds in 1 of 20 cases."""
        self.largest_s = float(np.median(self._each("largest_s")))
        """Seconds that one worker takes for the largest unit: no number of workers is faster."""
        self.useful_workers = max(1, round(float(np.median(self._each("useful_workers")))))
        """With more workers than this, the largest unit alone determines the time."""
        self.load_s = float(np.mean(self._each("load_s")))

    def _each(self, name: str) -> list[float]:
        return [getattr(one, name) for one in self._facts]

    def forecast(
        self, workers: int | None, *, within_s: float | None = None, limit_s: float | None = None
    ) -> Forecast:
        """Forecast the work left for workers that begin now and replace the running ones.

        Without a number, the living workers go on with their batches. ``limit_s`` is the time limit
        of one job: further jobs follow until all is done.
        """
        count = len(self._work.workers) if workers is None else workers
        busy = min(count, self._work.most_workers or count)
        if workers not in self._known:
            self._known[workers] = [schedule(phases, count) for phases in self._anew]
        courses = self._known[workers]
        whole = np.array([course.makespan_s for course in courses])
        if self._work.ends_s is not None:
            # The evaluations that run when the time is up are still finished.
            whole = np.minimum(whole, self._work.ends_s + self.item_s.median)
        times, jobs, sure_jobs = whole, None, 0
        if limit_s is not None and self.fits(limit_s):
            times, row = self._in_a_row(whole, busy, limit_s)
            jobs, sure_jobs = Interval.of(row), math.ceil(np.quantile(row, SURE))
        found = Forecast(
            workers=count,
            time_s=Interval.of(times),
            sure_s=float(np.quantile(times, SURE)),
            worker_s=Interval.of([course.busy_s for course in courses]),
            draws=self._draws,
            jobs=jobs,
            sure_jobs=sure_jobs,
            lost_s=float(np.mean(times - whole)),
        )
        if within_s is None:
            return found
        # Assume that the losses at the ends of jobs are spread evenly.
        by = within_s * whole / np.maximum(times, 1e-9)
        shares = [course.share_by(at) for course, at in zip(courses, by, strict=True)]
        return replace(found, within=float(np.mean(times <= within_s)), share=Interval.of(shares))

    def fits(self, limit_s: float) -> bool:
        """Return whether a job of this limit probably has room for the longest item, and for more
        than it loses at its end.
        """
        needed = [max(one.longest_s, one.cut_s + one.load_s + START_S) for one in self._facts]
        return float(np.median(needed)) <= limit_s

    def _in_a_row(self, whole: Floats, workers: int, limit_s: float) -> tuple[Floats, Floats]:
        """Return the time and the number of jobs for each draw. Each job but the last ends while
        its workers are in the middle of items, and the next job must start and load again.
        """
        chance = np.random.default_rng(self._seed)
        times, jobs = whole.copy(), np.ones(len(whole))
        for number, facts in enumerate(self._facts):
            # Mean over workers of the work that each loses, by where in an item it was cut.
            cut_s = facts.cut_s * chance.gamma(workers, size=_ENDS) / workers
            lost_s = np.minimum(cut_s + facts.load_s + START_S, _MOST_LOST * limit_s)
            lost_s = np.concatenate([[0.0], np.cumsum(lost_s)])
            done_s = limit_s * np.arange(_ENDS + 1) - lost_s
            again, left_s = divmod(max(whole[number] - limit_s, 0.0), done_s[-1])
            ends = int(np.searchsorted(done_s, left_s))
            times[number] += again * lost_s[-1] + lost_s[ends]
            jobs[number] += again * _ENDS + ends
        return times, jobs


@dataclass(frozen=True, slots=True)
class _Facts:
    mean_s: float
    longest_s: float
    cut_s: float
    """Mean seconds that a worker loses when its job ends in the middle of an item."""
    largest_s: float
    """Seconds of one worker for the largest unit."""
    useful_workers: float
    load_s: float


def _facts(items: int, lengths: Sequence[Lengths], phases: Sequence[Phase]) -> _Facts:
    jobs = [job for phase in phases for job in phase.jobs]
    work_s = float(sum(one.batches.sum() for one in lengths))
    largest_s = max(job.seconds / job.units for job in jobs)
    return _Facts(
        mean_s=work_s / items,
        longest_s=max(one.longest_s for one in lengths),
        # At a random moment, a worker is more likely to be in a long item than in a short one.
        cut_s=sum(one.squares for one in lengths) / (2 * work_s),
        largest_s=largest_s,
        useful_workers=sum(job.seconds for job in jobs) / max(largest_s, 1e-9),
        load_s=float(np.mean([job.load_s for job in jobs])),
    )


def _phases(
    work: Work, lengths: Sequence[Lengths], again: Sequence[Sequence[int]], *, going_on: bool
) -> list[Phase]:
    return [
        phase
        for stage, drawn, extra in zip(work.stages, lengths, again, strict=True)
        for phase in phases_of(stage, drawn, going_on=going_on, extra=extra)
    ]


def _model(stage: StageWork, guess: Guess | None) -> LearnedLengths | GuessedLengths:
    if stage.seen:
        return LearnedLengths(stage)
    if guess is None:
        message = f"no item of {stage.name} has ended yet, so durations are unknown"
        hint = "give an estimate such as --item-time 30s, or wait for the first results"
        raise ConfigError(message, hint=hint)
    return GuessedLengths(stage, guess)


def _again(stage: StageWork, chance: np.random.Generator) -> list[int]:
    """Draw the items that run again, once per failure, from the failure rate so far."""
    if not stage.retried:
        return []
    rate = chance.beta(stage.retried + 0.5, stage.attempts - stage.retried + 0.5)
    failures = chance.geometric(1.0 - min(rate, 0.9), size=len(stage.left)) - 1
    return [item for item, times in enumerate(failures) for _ in range(times)]
