"""Turn the scores of several tasks into the one number that a policy maximises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.rule import TIE_DECIMALS
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.policy import TaskSet
    from hpc_toolkit.bandit.rule import TaskResults


WORDS = {
    "mean": "mean over tasks",
    "mean-filled": "mean over tasks, missing ones filled in",
    "mean-kind": "mean over kinds of tasks",
    "mean-rank": "mean rank over tasks",
    "mean-z": "mean over tasks of z-scores",
}
"""The description of each scalariser for users."""


def mean(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean of the scores that an arm has.

    As for all scalarisers, ``scores`` has shape (n_arms, n_tasks) with NaN for no score. The
    result has shape (n_arms,), NaN for an arm without any score, and does not depend on the order
    of the tasks.
    """
    return _row_means(scores)


def mean_filled(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over all tasks on which any given arm has a score, with missing scores predicted.

    The prediction is the task's mean plus the mean of the arm's own z-scores times the task's
    standard deviation (a model of rank one, in which a better arm is better on every task). So an
    arm gains nothing by failing on hard tasks. Equal to ``mean`` if no score is missing.
    """
    centre, spread = _centre_and_spread(scores)
    levels = _row_means((scores - centre) / spread)
    filled = np.where(np.isnan(scores), centre + spread * levels[:, None], scores)
    return _row_means(filled[:, ~np.isnan(scores).all(axis=0)])


def mean_z(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over tasks of (score - mean of the task) / (standard deviation of the task).

    Both are over the given arms; a task on which all scores are equal counts 0. Tasks of any scale
    weigh the same, and a reward changes as more arms are told.
    """
    centre, spread = _centre_and_spread(scores)
    return _row_means((scores - centre) / spread)


def mean_rank(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over tasks of the share of the other given arms that an arm beats; a tie counts 1/2.

    It is 1 for an arm that is the best on every task, 0 for an arm that is the worst.
    """
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
    return _row_means(ranks)


def mean_kind(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over the kinds of tasks of the mean score on a kind's tasks, as in MTEB's mean by task
    type (Muennighoff et al. 2023, arXiv 2210.07316). Every task must have a kind.
    """
    kinds = np.array(tasks.kinds)
    by_kind = [_row_means(scores[:, kinds == kind]) for kind in sorted(set(tasks.kinds))]
    return _row_means(np.array(by_kind).T)


SCALARISERS: dict[str, Callable[[NDArray[np.float64], TaskSet], NDArray[np.float64]]] = {
    "mean": mean,
    "mean-filled": mean_filled,
    "mean-kind": mean_kind,
    "mean-rank": mean_rank,
    "mean-z": mean_z,
}
"""To add a scalariser, write its function and add it here, to ``WORDS`` and to ``weights``."""


def weights(name: str, scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64] | None:
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
    share = known / np.maximum(known.sum(axis=1, keepdims=True), 1)
    spread = _centre_and_spread(scores)[1]
    if name == "mean-z":
        share = share / spread
    if name == "mean-filled":
        used = known.any(axis=0)
        lacking = ((~known & used) * spread).sum(axis=1, keepdims=True)
        # A score also moves the predicted scores, through the arm's mean z-score.
        share = (known + lacking * share / spread) / max(int(used.sum()), 1)
    return np.asarray(share, np.float64)


def check_scalariser(name: str, tasks: TaskSet | None) -> None:
    """Raise ConfigError for an unknown name, and for a scalariser that these tasks do not allow."""
    if name not in SCALARISERS:
        message = f"unknown scalariser {name!r}"
        raise ConfigError(message, hint=near_miss(name, list(SCALARISERS)))
    if name == "mean-kind" and (tasks is None or not tasks.kinds):
        message = "the scalariser 'mean-kind' needs the kind of every task"
        raise ConfigError(message, hint="give the task set its kinds, or take 'mean'")


def _row_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    means = np.full(len(values), math.nan)
    for index, row in enumerate(values):
        numbers = row[~np.isnan(row)].tolist()
        if numbers:
            # An exact sum, so that the order of the tasks cannot change the last bit.
            means[index] = math.fsum(numbers) / len(numbers)
    return means


def _centre_and_spread(
    scores: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and deviation by task: 0 and 1 without scores, deviation 1 if all are equal."""
    centre, spread = np.zeros(scores.shape[1]), np.ones(scores.shape[1])
    for index, column in enumerate(scores.T):
        known = column[~np.isnan(column)]
        if known.size:
            centre[index], deviation = known.mean(), known.std()
            # A smaller deviation is rounding error between equal scores.
            if deviation > 1e-12 * max(1.0, abs(centre[index])):
                spread[index] = deviation
    return centre, spread


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


def _stderr(stderrs: np.ndarray, slopes: np.ndarray, known: np.ndarray) -> float | None:
    told = stderrs[known & ~np.isnan(stderrs)]
    if not told.size:
        return None
    typical = math.fsum(float(error) ** 2 for error in told) / told.size
    squares = np.where(np.isnan(stderrs), typical, stderrs**2)[known]
    return math.sqrt(math.fsum((slopes[known] ** 2 * squares).tolist()))
