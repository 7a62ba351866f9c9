"""How far arms are behind the best arm, and the probability that they overtake it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc_toolkit.bandit.arms import columns
from hpc_toolkit.bandit.regression import Posterior, fit
from hpc_toolkit.bandit.rule import first_best

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rule import Finalists, History


class Gaps(NamedTuple):
    """How far each arm is behind the leader."""

    leader: int
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


def win_odds(history: History, judged: Finalists | None = None) -> NDArray[np.float64]:
    """Return shape (n_arms,): the probability that an arm's reward exceeds the best told reward.

    Each probability is for one arm: even if none exceeds x, the probability that any arm wins may
    exceed x. It is 0 for decided arms: told on all tasks, failed, or no longer in the running.

    If the rule reports the arms in the running (``judged``), use their paired differences to the
    leader (see :func:`gaps`), taken as normal; 1 with fewer than two common tasks. Otherwise use
    a Gaussian process over the geometry, fitted to the rewards like the default ``gp-ucb``; 1 while
    no arm has a reward. Either model can be wrong.
    """
    if judged is not None:
        return _paired(history, judged)
    odds = np.ones(len(history.table.arms))
    odds[[*history.scored, *history.failed]] = 0.0
    open_arms = np.flatnonzero(odds)
    if not history.scored or not open_arms.size:
        return odds
    centre, spread = float(history.rewards.mean()), float(history.rewards.std())
    if spread <= 1e-12 * max(1.0, abs(centre)):
        return odds
    points = columns(history.table, "geometry")
    x, y = points[list(history.scored)], (history.rewards - centre) / spread
    posterior = Posterior(x, y, points[open_arms], fit(x, y))
    odds[open_arms] = _above(posterior.mean - y.max(), posterior.sd)
    return odds


def _paired(history: History, judged: Finalists) -> NDArray[np.float64]:
    odds = np.zeros(len(history.table.arms))
    arms, done = list(judged.arms), len(judged.tasks)
    population = len(history.results.tasks.names) - len(judged.dropped)
    if len(arms) < 2 or done >= population:
        return odds
    scores = history.results.scores[np.ix_(arms, judged.tasks)]
    leader = None if judged.leader is None else arms.index(judged.leader)
    found = gaps(scores, population, leader)
    odds[arms] = np.where(np.isinf(found.errors), 1.0, _above(-found.means, found.errors))
    odds[arms[found.leader]] = 0.0
    return odds


def _above(means: NDArray[np.float64], sds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probability that normal variables are above 0: 0 or 1 without spread."""
    found = [
        0.5 * math.erfc(-mean / (sd * math.sqrt(2.0))) if sd > 0 else float(mean > 0)
        for mean, sd in zip(means.tolist(), sds.tolist(), strict=True)
    ]
    return np.array(found)
