"""Turn the scores of several tasks into the one number that a policy maximises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import Floats, TaskSet, look_up
from hpc_toolkit.bandit.rule import TIE_DECIMALS, TaskResults, first_best
from hpc_toolkit.errors import ConfigError

WORDS = {
    "mean": "mean over tasks",
    "mean-kind": "mean over kinds of tasks",
    "mean-rank": "mean rank over tasks",
}
"""The description of each scalariser for users."""


def mean(scores: Floats, tasks: TaskSet) -> Floats:
    """Mean of the scores that an arm has.

    As for all scalarisers, ``scores`` has shape (n_arms, n_tasks) with NaN for no score. The
    result has shape (n_arms,), NaN for an arm without any score, and does not depend on the order
    of the tasks.
    """
    return _row_means(scores)


def mean_rank(scores: Floats, tasks: TaskSet) -> Floats:
    """Mean over tasks of the share of the other given arms that an arm beats; a tie counts 1/2.

    It is 1 for an arm that is the best on every task, 0 for an arm that is the worst.
    """
    return _row_means(_ranks(scores))


def _ranks(scores: Floats) -> Floats:
    ranks = np.full(scores.shape, math.nan)
    for column, out in zip(scores.T, ranks.T, strict=True):
        known = np.flatnonzero(~np.isnan(column))
        values = np.round(column[known], TIE_DECIMALS)
        order = np.sort(values)
        below = np.searchsorted(order, values, side="left")
        not_above = np.searchsorted(order, values, side="right")
        # Equal arms count one half each, and the arm itself does not count.
        beaten = below + 0.5 * (not_above - below - 1)
        out[known] = beaten / max(len(known) - 1, 1) if len(known) > 1 else 0.5
    return ranks


def mean_kind(scores: Floats, tasks: TaskSet) -> Floats:
    """Mean over the kinds of tasks of the mean score on a kind's tasks, as in MTEB's mean by task
    type (Muennighoff et al. 2023, arXiv 2210.07316). Every task must have a kind.
    """
    kinds = np.array(tasks.kinds)
    by_kind = [_row_means(scores[:, kinds == kind]) for kind in sorted(set(tasks.kinds))]
    return _row_means(np.array(by_kind).T)


SCALARISERS: dict[str, Callable[[Floats, TaskSet], Floats]] = {
    "mean": mean,
    "mean-kind": mean_kind,
    "mean-rank": mean_rank,
}
"""To add a scalariser, write its function and add it here, to ``WORDS`` and to ``weights``."""
OF_EACH_ARM = ("mean", "mean-kind")
"""Scalarisers whose value of an arm does not depend on other arms."""


def weights(name: str, scores: Floats, tasks: TaskSet) -> Floats | None:
    """Return how much each score moves its arm's reward, for the reward's standard error: shape
    (n_arms, n_tasks), 0 for no score. None for ``mean-rank``: small changes do not move a rank.
    """
    known = ~np.isnan(scores)
    if name == "mean-rank":
        return None
    if name == "mean-kind":
        kinds = np.array(tasks.kinds)
        # Floats, because a product of boolean matrices does not count.
        alike = (kinds[:, None] == kinds[None, :]).astype(np.float64)
        # Per arm: the number of scores of each task's kind, and of the kinds that have a score.
        of_kind = np.maximum(known @ alike, 1)
        n_kinds = np.where(known, 1.0 / of_kind, 0.0).sum(axis=1, keepdims=True)
        return np.where(known, 1.0 / (of_kind * np.maximum(n_kinds, 1.0)), 0.0)
    return np.asarray(known / np.maximum(known.sum(axis=1, keepdims=True), 1), np.float64)


def check_scalariser(name: str, tasks: TaskSet) -> None:
    """Raise ConfigError for an unknown name, and for a scalariser that these tasks do not allow."""
    look_up("scalariser", name, SCALARISERS)
    if name == "mean-kind" and not tasks.kinds:
        message = "the scalariser 'mean-kind' needs the kind of every task"
        raise ConfigError(message, hint="name the kind of each task, or use 'mean'")


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
    """The scalariser's value for the arm's scores."""
    stderr: float | None
    """Standard error of ``mean``, assuming that errors of tasks are independent; None: unknown."""


def rewards_of(
    results: TaskResults,
    arms: Sequence[int],
    *,
    tasks: Sequence[int] | None = None,
    scalariser: str = "mean",
) -> dict[int, Reward]:
    """Return the rewards of some arms over some tasks, by default all tasks.

    An arm with more failed tasks than scores has no reward. A task without a standard error counts
    with the root mean square of the arm's known ones. Failed tasks are left out; apart from the
    scalariser itself, nothing adjusts the reward for how hard they are.
    """
    columns = list(range(len(results.tasks.names)) if tasks is None else tasks)
    part = results.tasks.part(columns)
    where = np.ix_(list(arms), columns)
    scores, stderrs, told = results.scores[where], results.stderrs[where], results.told[where]
    known = ~np.isnan(scores)
    counts, failures = known.sum(axis=1), (told & ~known).sum(axis=1)
    usable = np.flatnonzero((counts > 0) & (counts >= failures)).tolist()
    scores, stderrs = scores[usable], stderrs[usable]
    means = SCALARISERS[scalariser](scores, part)
    slopes = weights(scalariser, scores, part)
    found = {}
    for row, index in enumerate(usable):
        stderr = None if slopes is None else _stderr(stderrs[row], slopes[row], known[index])
        found[int(arms[index])] = Reward(float(means[row]), stderr)
    return found


def gaps_of(
    results: TaskResults, top: int, arms: Sequence[int], *, tasks: Sequence[int], scalariser: str
) -> list[tuple[float, float | None]]:
    """How far the reward of each arm is below that of ``top``, and how much of it may be noise.

    Both are from the paired differences on the tasks that both arms have. The noise is the half
    width of the 95 % interval of their mean; None: they have fewer than two tasks in common.
    """
    values = results.scores[np.ix_([top, *arms], tasks)]
    if scalariser == "mean-rank":
        values, scalariser = _ranks(values), "mean"
    behind = values[0] - values[1:]
    slopes = weights(scalariser, behind, results.tasks.part(tasks))
    assert slopes is not None
    squares = (behind - _row_means(behind)[:, None]) ** 2
    found: list[tuple[float, float | None]] = []
    for row, known in enumerate(~np.isnan(behind)):
        gap, free = math.fsum((slopes[row] * behind[row])[known]), int(known.sum()) - 1
        spread = math.sqrt(math.fsum(squares[row][known]) * math.fsum(slopes[row] ** 2))
        found.append((gap, _student(free) * spread / math.sqrt(free) if free > 0 else None))
    return found


def _student(free: int) -> float:
    """Student's two-sided 95 % quantile; above 6 degrees of freedom at most 2 % too large."""
    return (12.71, 4.31, 3.19, 2.78, 2.58, 2.45)[free - 1] if free < 7 else 1.98 + 2.7 / free


def _stderr(stderrs: np.ndarray, slopes: np.ndarray, known: np.ndarray) -> float | None:
    told = stderrs[known & ~np.isnan(stderrs)]
    if not told.size:
        return None
    typical = math.fsum(float(error) ** 2 for error in told) / told.size
    squares = np.where(np.isnan(stderrs), typical, stderrs**2)[known]
    return math.sqrt(math.fsum((slopes[known] ** 2 * squares).tolist()))


class Gaps(NamedTuple):
    """How far each arm is behind the leader."""

    leader: int
    means: Floats
    """Shape (n_arms,): mean of the leader's score minus the arm's, over the tasks on which both
    have a score; 0 for the leader and for an arm without such a task."""
    errors: Floats
    """Shape (n_arms,): standard error of ``means`` as an estimate for all tasks: 0 after all
    tasks, and before that infinite for an arm with fewer than two common tasks."""


def gaps(scores: Floats, population: int, leader: int | None = None) -> Gaps:
    """Compare arms after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), at least 1 x 1, NaN for no score. ``leader`` defaults to
    :func:`best_row`. The error is sd / sqrt(common tasks) * sqrt(1 - k / population): the standard
    deviation of the paired differences, with one degree of freedom less than common tasks, and the
    finite population correction of survey sampling.
    """
    done = scores.shape[1]
    leader = best_row(scores) if leader is None else leader
    behind = scores[leader] - scores
    counts = (~np.isnan(behind)).sum(axis=1)
    means = np.nansum(behind, axis=1) / np.maximum(counts, 1)
    squares = np.nansum((behind - means[:, None]) ** 2, axis=1)
    variance = squares / np.maximum(counts - 1, 1) / np.maximum(counts, 1)
    errors = np.sqrt(variance * (1.0 - done / population))
    if done < population:
        errors[counts < 2] = np.inf
    return Gaps(leader, means, errors)


def best_row(scores: Floats) -> int:
    """Return the row with the highest mean; ties go to the first.

    A missing score counts as the task's mean over the rows, so that no arm leads by having failed
    on the hard tasks.
    """
    known = ~np.isnan(scores)
    centre = np.nansum(scores, axis=0) / np.maximum(known.sum(axis=0), 1)
    return first_best(np.where(known, scores - centre, 0.0).mean(axis=1))
