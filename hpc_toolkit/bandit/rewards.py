"""The reward of an arm: the mean of its scores over several tasks; and how far arms are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import Floats
from hpc_toolkit.bandit.rule import TaskResults, first_best


def _row_means(values: Floats) -> Floats:
    means = np.full(len(values), math.nan)
    for index, row in enumerate(values):
        numbers = row[~np.isnan(row)].tolist()
        if numbers:
            # An exact sum, so that the order of the tasks cannot change the last bit.
            means[index] = math.fsum(numbers) / len(numbers)
    return means


@dataclass(frozen=True, slots=True)
class Reward:
    """One arm's reward."""

    mean: float
    """Mean of the arm's scores."""
    stderr: float | None
    """Standard error of ``mean``, assuming that errors of tasks are independent; None: unknown."""


def rewards_of(
    results: TaskResults, arms: Sequence[int], *, tasks: Sequence[int] | None = None
) -> dict[int, Reward]:
    """Return the rewards of some arms over some tasks, by default all tasks.

    An arm with more failed tasks than scores has no reward. A task without a standard error counts
    with the root mean square of the arm's known ones. Failed tasks are left out; nothing adjusts
    the reward for how hard they are.
    """
    columns = list(range(len(results.tasks.names)) if tasks is None else tasks)
    where = np.ix_(list(arms), columns)
    scores, stderrs, told = results.scores[where], results.stderrs[where], results.told[where]
    known = ~np.isnan(scores)
    counts, failures = known.sum(axis=1), (told & ~known).sum(axis=1)
    usable = np.flatnonzero((counts > 0) & (counts >= failures)).tolist()
    scores, stderrs = scores[usable], stderrs[usable]
    means = _row_means(scores)
    return {
        int(arms[index]): Reward(float(means[row]), _stderr(stderrs[row], known[index]))
        for row, index in enumerate(usable)
    }


def gaps_of(
    results: TaskResults, top: int, arms: Sequence[int], *, tasks: Sequence[int]
) -> list[tuple[float, float | None]]:
    """How far the reward of each arm is below that of ``top``, and how much of it may be noise.

    Both are from the paired differences on the tasks that both arms have. The noise is the half
    width of the 95 % interval of their mean; None: they have fewer than two tasks in common.
    """
    values = results.scores[np.ix_([top, *arms], tasks)]
    behind = values[0] - values[1:]
    means = _row_means(behind)
    squares = (behind - means[:, None]) ** 2
    found: list[tuple[float, float | None]] = []
    for row, known in enumerate(~np.isnan(behind)):
        count = int(known.sum())
        spread = math.sqrt(math.fsum(squares[row][known]) / max(count, 1))
        noise = _student(count - 1) * spread / math.sqrt(count - 1) if count > 1 else None
        found.append((float(means[row]) if count else 0.0, noise))
    return found


def _student(free: int) -> float:
    """Student's two-sided 95 % quantile; above 6 degrees of freedom at most 2 % too large."""
    return (12.71, 4.31, 3.19, 2.78, 2.58, 2.45)[free - 1] if free < 7 else 1.98 + 2.7 / free


def _stderr(stderrs: np.ndarray, known: np.ndarray) -> float | None:
    told = stderrs[known & ~np.isnan(stderrs)]
    if not told.size:
        return None
    typical = math.fsum(float(error) ** 2 for error in told) / told.size
    squares = np.where(np.isnan(stderrs), typical, stderrs**2)[known]
    return math.sqrt(math.fsum(squares.tolist())) / len(squares)


class Gaps(NamedTuple):
    """How far each arm is behind the leader."""

    means: Floats
    """Shape (n_arms,): mean of the leader's score minus the arm's, over the tasks on which both
    have a score; 0 for the leader and for an arm without such a task."""
    errors: Floats
    """Shape (n_arms,): standard error of ``means`` as an estimate for all tasks: 0 after all
    tasks, and before that infinite for an arm with fewer than two common tasks."""


def gaps(scores: Floats, population: int) -> Gaps:
    """Compare arms with the leader (:func:`best_row`) after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), at least 1 x 1, NaN for no score. The error is
    sd / sqrt(common tasks) * sqrt(1 - k / population): the standard deviation of the paired
    differences, with one degree of freedom less than common tasks, and the finite population
    correction of survey sampling.
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
    return Gaps(means, errors)


def best_row(scores: Floats) -> int:
    """Return the row with the highest mean; ties go to the first.

    A missing score counts as the task's mean over the rows, so that no arm leads by having failed
    on the hard tasks.
    """
    known = ~np.isnan(scores)
    centre = np.nansum(scores, axis=0) / np.maximum(known.sum(axis=0), 1)
    return first_best(np.where(known, scores - centre, 0.0).mean(axis=1))
