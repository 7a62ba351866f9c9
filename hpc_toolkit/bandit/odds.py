"""How probable it is that another arm is better than the best one so far."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.features import columns
from hpc_toolkit.bandit.gp.evidence import fit
from hpc_toolkit.bandit.gp.regression import Posterior

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import Finalists, History


def win_odds(history: History, judged: Finalists | None = None) -> NDArray[np.float64]:
    """Shape (n_arms,): the probability that an arm's reward exceeds that of the best arm told.

    Of each arm alone, so that "no arm wins with probability > x" leaves all of them together more
    than x. 0 for arms that are decided: told on all tasks, failed, or no longer in the running.

    Where the rule says which arms are (``judged``), from their paired differences to the leader
    over the tasks that they were told on, taken as normal, with the finite population correction;
    1 with fewer than two such tasks. Else from a Gaussian process over the geometry, fitted to the
    rewards as ``gp-ucb`` does by default; 1 while no arm has a reward. Either model can be wrong.
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
    arms, done, population = list(judged.arms), len(judged.tasks), len(history.tasks.names)
    if len(arms) < 2 or done >= population:
        return odds
    scores = history.scores[np.ix_(arms, judged.tasks)]
    leader = arms.index(judged.leader) if judged.leader is not None else _highest(scores)
    ahead = scores - scores[leader]
    counts = (~np.isnan(ahead)).sum(axis=1)
    means = np.nansum(ahead, axis=1) / np.maximum(counts, 1)
    squares = np.nansum((ahead - means[:, None]) ** 2, axis=1)
    variance = squares / np.maximum(counts - 1, 1) / np.maximum(counts, 1)
    found = _above(means, np.sqrt(variance * (1.0 - done / population)))
    odds[arms] = np.where(counts < 2, 1.0, found)
    odds[arms[leader]] = 0.0
    return odds


def _highest(scores: NDArray[np.float64]) -> int:
    known = ~np.isnan(scores)
    return int(np.argmax(np.nansum(scores, axis=1) / np.maximum(known.sum(axis=1), 1)))


def _above(means: NDArray[np.float64], sds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The probability that normal variables are above 0; one without spread is above or not."""
    found = [
        0.5 * math.erfc(-mean / (sd * math.sqrt(2.0))) if sd > 0 else float(mean > 0)
        for mean, sd in zip(means.tolist(), sds.tolist(), strict=True)
    ]
    return np.array(found)
