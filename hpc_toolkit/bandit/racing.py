"""Racing: evaluate arms on a few tasks, and only the best on more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Floats, Indices, Pull
from hpc_toolkit.bandit.rule import (
    TIE_DECIMALS,
    Finalists,
    History,
    Rule,
    Stream,
    first_best,
    number_option,
)


def task_order(history: History) -> tuple[tuple[int, ...], int | None]:
    """Return the indices of the tasks from shortest to longest, those of unknown duration last.

    By the expected durations, if the task set has one for every task, otherwise by those of a pilot
    arm. The seed draws the pilot; if it has neither a score nor a duration on any task, the next
    arm drawn takes its place. It is returned without tasks until all of its results are known.
    """
    seconds = history.results.tasks.expected
    if np.isnan(seconds).any():
        drawn = np.random.default_rng([history.seed, Stream.PILOT])
        for arm in drawn.permutation(len(history.table.arms)).tolist():
            if not history.results.told[arm].all():
                return (), arm
            seconds = history.results.seconds[arm]
            # After scores without durations, another pilot would not give any either.
            if not (np.isnan(seconds) & np.isnan(history.results.scores[arm])).all():
                break
    known = np.where(np.isnan(seconds), np.inf, seconds)
    return tuple(np.argsort(known, kind="stable").tolist()), None


class Rung:
    """The state of a contest of arms, computed from the beginning for every ask."""

    def __init__(self, history: History, order: tuple[int, ...]) -> None:
        self._history = history
        self._order = order
        self.arms: Indices = np.arange(len(history.table.arms))
        """Ascending indices of the remaining arms."""
        self.done = 0
        """All remaining arms were told on the first ``done`` tasks of the order."""
        self.counted: tuple[int, ...] = ()
        """The tasks among these by which arms are compared."""
        self.until: int | None = None
        """The arms must be told on the first ``until`` tasks next; None: the contest is over."""

    @property
    def scores(self) -> Floats:
        """Scores of the remaining arms on the counted tasks, shape (len(arms), len(counted))."""
        return self._history.results.scores[self.arms][:, self.counted]

    def reach(self, until: int) -> bool:
        """Advance to the first ``until`` tasks; if some are not told, request them, return False.

        The remaining arms at that point decide once and for all which of the new tasks count. A
        task cannot compare the arms if none has a score, or only one of more than two. This is the
        fault of the task, for instance of a missing data set, and not of an arm. A single score may
        have been told earlier, when the task could still be evaluated.
        """
        new = self._order[self.done : until]
        if not self._history.results.told[self.arms][:, new].all():
            self.until = until
            return False
        known = ~np.isnan(self._history.results.scores[self.arms][:, new])
        lost = known.sum(axis=0) < (2 if len(self.arms) > 2 else 1)
        self.counted += tuple(np.array(new)[~lost].tolist())
        self.done = until
        return True

    def proposals(self, n: int) -> list[Pull]:
        """Return the first ``n`` requested pulls; none when the contest is over."""
        if self.until is None:
            return []
        return proposals(self._history, self.arms.tolist(), self._order[: self.until], n)


def proposals(history: History, arms: Sequence[int], tasks: Sequence[int], n: int) -> list[Pull]:
    """Propose the first ``n`` arms that lack some of these tasks, each with its missing tasks.
    The list is empty if all have a result or are pending.
    """
    names, asked = history.results.tasks.names, history.results.asked
    left = ((arm, tuple(names[task] for task in tasks if not asked[arm, task])) for arm in arms)
    found = (Pull(history.table.ids[arm], some) for arm, some in left if some)
    return list(islice(found, n))


@dataclass(frozen=True, slots=True)
class Racing(Rule):
    """Evaluate the cheapest tasks first; arms that fall too far behind the leader drop out.

    Where the durations of the tasks are not known, a pilot arm is evaluated first on all of them.
    Once all remaining arms were told on k of K tasks, with k at least ``first``, arm a drops out
    if ``mean(leader - a) > c * sd(leader - a) / sqrt(k) * sqrt(1 - k / K)``, by paired differences
    (see ``gaps``). See Maron and Moore 1994, "Hoeffding races", and Birattari et al. 2002. The
    race ends with one arm, or after all tasks with the exact mean. Arms are checked after every
    task, so ``c`` is not a quantile of a known error. An arm with more failed tasks than scores
    drops out, and a task that cannot compare the arms counts in neither k nor K.
    """

    name: ClassVar[str] = "racing"
    c: float = number_option(2.5)
    """Standard errors behind the leader at which an arm drops out."""
    first: int = number_option(3, low=2)
    """Number of tasks before any arm drops out."""
    block: int = number_option(1, low=1)
    """Number of tasks between one check and the next."""

    def choose(self, history: History, n: int) -> list[Pull]:
        order, pilot = task_order(history)
        if pilot is not None:
            # Nothing while the pilot is being evaluated.
            tasks = range(len(history.results.tasks.names))
            return proposals(history, [pilot], tasks, n)
        return self._rung(history, order).proposals(n)

    def finalists(self, history: History) -> Finalists | None:
        order, pilot = task_order(history)
        if pilot is not None:
            return None
        rung = self._rung(history, order)
        return self._last(rung) if rung.counted and rung.arms.size else None

    def _last(self, rung: Rung) -> Finalists | None:
        rung.arms = rung.arms[comparable(rung.scores)]
        if not rung.arms.size:
            return None
        leader = int(rung.arms[best_row(rung.scores)])
        return Finalists(tuple(rung.arms.tolist()), rung.counted, leader)

    def _rung(self, history: History, order: tuple[int, ...]) -> Rung:
        rung, look, tasks = Rung(history, order), self.first, len(order)
        while len(rung.arms) > 1 or not rung.counted:
            missing = max(look - len(rung.counted), 1)
            if rung.done == tasks or not rung.reach(min(rung.done + missing, tasks)):
                break
            if len(rung.counted) >= look or rung.done == tasks:
                if rung.counted:
                    lost = rung.done - len(rung.counted)
                    left = survivors(rung.scores, tasks - lost, self.c)
                    rung.arms = rung.arms[left]
                look = len(rung.counted) + self.block
        return rung


def survivors(scores: Floats, population: int, c: float) -> Indices:
    """Return the rows that are still in the race after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), k >= 1, NaN for a failed task. The leader is always included,
    unless no arm has a score for half of the tasks.
    """
    usable = comparable(scores)
    if not usable.size:
        return usable
    means, errors = gaps(scores[usable], population)
    unknown = np.isinf(errors)
    bounds = c * np.where(unknown, 0.0, errors)
    # Without the rounding, the last bit of a sum would separate equal arms.
    near = unknown | (np.round(means - bounds, TIE_DECIMALS) <= 0.0)
    return np.asarray(usable[near], np.intp)


def comparable(scores: Floats) -> Indices:
    """Return the rows with a score for at least half of the tasks."""
    return np.flatnonzero(2 * (~np.isnan(scores)).sum(axis=1) >= scores.shape[1])


def gaps(scores: Floats, population: int) -> tuple[Floats, Floats]:
    """Compare arms with the leader (:func:`best_row`) after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), at least 1 x 1, NaN for no score. Returns for each arm the
    mean of the leader's score minus its own, over the tasks on which both have a score: 0 for the
    leader and without such a task. And the standard error of this mean as an estimate for all
    tasks, sd / sqrt(common tasks) * sqrt(1 - k / population): the standard deviation of the paired
    differences, with one degree of freedom less than common tasks, and the finite population
    correction of survey sampling. It is infinite with fewer than two common tasks, and 0 after all.
    """
    done = scores.shape[1]
    behind = scores[best_row(scores)] - scores
    counts = (~np.isnan(behind)).sum(axis=1)
    means = np.nansum(behind, axis=1) / np.maximum(counts, 1)
    squares = np.nansum((behind - means[:, None]) ** 2, axis=1)
    variance = squares / np.maximum(counts - 1, 1) / np.maximum(counts, 1)
    errors = np.sqrt(variance * (1.0 - done / population))
    if done < population:
        errors[counts < 2] = np.inf
    return means, errors


def best_row(scores: Floats) -> int:
    """Return the row with the highest mean; ties go to the first.

    A missing score counts as the task's mean over the rows, so that no arm leads by having failed
    on the hard tasks.
    """
    known = ~np.isnan(scores)
    centre = np.nansum(scores, axis=0) / np.maximum(known.sum(axis=0), 1)
    return first_best(np.where(known, scores - centre, 0.0).mean(axis=1))
