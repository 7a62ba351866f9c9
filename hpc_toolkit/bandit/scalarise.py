"""From scores on several tasks to one reward per arm: the scalarisers by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.history import TIE_DECIMALS
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.pulls import TaskSet

WORDS = {
    "mean": "mean over tasks",
    "mean-filled": "mean over tasks, missing ones filled in",
    "mean-kind": "mean over kinds of tasks",
    "mean-rank": "mean rank over tasks",
    "mean-z": "mean over tasks of z-scores",
}
"""What people are told of each scalariser."""


def mean(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean of the scores that an arm has. Like all scalarisers: ``scores`` has shape
    (n_arms, n_tasks) with NaN for no score; the result has shape (n_arms,), NaN for an arm without
    any score, and does not depend on the order of the tasks.
    """
    return _row_means(scores)


def mean_filled(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over all tasks that any arm given has a score on; a score that an arm lacks counts as
    what is expected of it: the task's mean plus the mean of the arm's own z-scores times the task's
    standard deviation (a model of rank one, in which a better arm is better on every task). So an
    arm gains nothing by failing on hard tasks. The same as ``mean`` where nothing is missing.
    """
    centre, spread = _centre_and_spread(scores)
    levels = _row_means((scores - centre) / spread)
    filled = np.where(np.isnan(scores), centre + spread * levels[:, None], scores)
    return _row_means(filled[:, ~np.isnan(scores).all(axis=0)])


def mean_z(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over tasks of (score - mean of the task) / (standard deviation of the task), both over
    the arms given; 0 on a task on which all are equal. Tasks of any scale count alike, and a
    reward changes as more arms are told.
    """
    centre, spread = _centre_and_spread(scores)
    return _row_means((scores - centre) / spread)


def mean_rank(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over tasks of the share of the other arms given that an arm beats on the task, a tie as
    one half: 1 for the best on every task, 0 for the worst.
    """
    ranks = np.full(scores.shape, math.nan)
    for column, out in zip(scores.T, ranks.T, strict=True):
        known = np.flatnonzero(~np.isnan(column))
        values = np.round(column[known], TIE_DECIMALS)
        order = np.sort(values)
        below = np.searchsorted(order, values, side="left")
        not_above = np.searchsorted(order, values, side="right")
        # Equal ones count one half each, the arm itself not at all.
        beaten = below + 0.5 * (not_above - below - 1)
        out[known] = beaten / max(len(known) - 1, 1) if len(known) > 1 else 0.5
    return _row_means(ranks)


def mean_kind(scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64]:
    """Mean over the kinds of tasks of the mean score on a kind's tasks, as in MTEB's mean by task
    type (Muennighoff et al. 2023, arXiv 2210.07316). Raises ConfigError for tasks without kinds.
    """
    if not tasks.kinds:
        message = "the scalariser 'mean-kind' needs the kind of every task"
        raise ConfigError(message, hint="give the task set its kinds, or take 'mean'")
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
"""A new scalariser is a function, its entry here, in ``WORDS`` and in ``weights``."""


def weights(name: str, scores: NDArray[np.float64], tasks: TaskSet) -> NDArray[np.float64] | None:
    """By how much each score moves its arm's reward, shape (n_arms, n_tasks), 0 for no score: for
    the reward's standard error. None where a small change of a score moves nothing, in ranks.
    """
    known = ~np.isnan(scores)
    if name == "mean-rank":
        return None
    if name == "mean-kind":
        kinds = np.array(tasks.kinds)
        # As numbers: a product of truth values says whether there is one, not how many.
        alike = (kinds[:, None] == kinds[None, :]).astype(np.float64)
        # Scores of an arm that are of the same kind as a task, and kinds that it has a score of.
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
        # A score moves the expected ones with it, through the arm's mean z-score.
        share = (known + lacking * share / spread) / max(int(used.sum()), 1)
    return np.asarray(share, np.float64)


def check_scalariser(name: str, tasks: TaskSet | None) -> None:
    """Refuse a name that is not known, and one that these tasks cannot be used with."""
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
            # An exact sum, so that the order of the tasks does not decide in the last bit.
            means[index] = math.fsum(numbers) / len(numbers)
    return means


def _centre_and_spread(
    scores: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of every task, 0 and 1 for one without scores, and a deviation
    of 1 for one on which all are equal."""
    centre, spread = np.zeros(scores.shape[1]), np.ones(scores.shape[1])
    for index, column in enumerate(scores.T):
        known = column[~np.isnan(column)]
        if known.size:
            centre[index], deviation = known.mean(), known.std()
            # Below this it is what rounding left of equal scores.
            if deviation > 1e-12 * max(1.0, abs(centre[index])):
                spread[index] = deviation
    return centre, spread
