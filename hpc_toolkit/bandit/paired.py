"""Compare arms with the best of them, over the tasks on which both have a score."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc_toolkit.bandit.history import first_best

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Gaps(NamedTuple):
    """How far each arm is behind the leader."""

    leader: int
    """The leader's row."""

    means: NDArray[np.float64]
    """Shape (n_arms,): mean of the leader's score minus the arm's, over the tasks on which both
    have a score; 0 for the leader and for an arm without such a task."""

    errors: NDArray[np.float64]
    """Shape (n_arms,): standard error of ``means`` as an estimate for all tasks: 0 after all
    tasks, and before that infinite for an arm with fewer than two common tasks."""


def gaps(scores: NDArray[np.float64], population: int, leader: int | None = None) -> Gaps:
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


def best_row(scores: NDArray[np.float64]) -> int:
    """Return the row with the highest mean; ties go to the first.

    A missing score counts as the task's mean over the rows, so that no arm leads by having failed
    on the hard tasks.
    """
    known = ~np.isnan(scores)
    centre = np.nansum(scores, axis=0) / np.maximum(known.sum(axis=0), 1)
    return first_best(np.where(known, scores - centre, 0.0).mean(axis=1))


def silent_tasks(scores: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return shape (n_tasks,): True for tasks that cannot compare the arms.

    ``scores`` has shape (n_arms, n_tasks); all arms were told on all tasks. A task is silent if no
    arm has a score, or only one arm of more than two. This is the fault of the task, for instance
    of a missing data set, and not of an arm. A single score may have been told earlier, when the
    task could still be evaluated.
    """
    least = 2 if len(scores) > 2 else 1
    return np.asarray((~np.isnan(scores)).sum(axis=0) < least)
