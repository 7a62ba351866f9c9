"""The probability that another arm is better than the best arm so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.features import columns
from hpc_toolkit.bandit.gp.evidence import fit
from hpc_toolkit.bandit.gp.regression import Posterior
from hpc_toolkit.bandit.paired import gaps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import Finalists, History


def win_odds(history: History, judged: Finalists | None = None) -> NDArray[np.float64]:
    """Return shape (n_arms,): the probability that an arm's reward exceeds the best told reward.

    Each probability is for one arm: even if none exceeds x, the probability that any arm wins may
    exceed x. It is 0 for decided arms: told on all tasks, failed, or no longer in the running.

    If the rule reports the arms in the running (``judged``), use their paired differences to the
    leader (see ``paired.gaps``), taken as normal; 1 with fewer than two common tasks. Otherwise use
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
    population = len(history.tasks.names) - len(judged.dropped)
    if len(arms) < 2 or done >= population:
        return odds
    scores = history.scores[np.ix_(arms, judged.tasks)]
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
