"""What evaluating an arm will cost, learned from the durations of those told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.rules.guided import Scale
from hpc_toolkit.bandit.rules.linear import Ridge, design

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History

SHORTEST_S = 1e-3
"""In place of shorter durations, whose logarithm would be far from the others."""


def expected_seconds(history: History, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shape (n_arms,): seconds on one worker for all tasks of an arm; 1 where nothing is known.

    A ridge regression of the logarithm on ``points``, shape (n_arms, n_columns), from the arms
    with a reward whose every told task has a duration.
    """
    results = history.by_task
    timed = [
        arm
        for arm in history.scored
        if results.told[arm].any() and not np.isnan(results.seconds[arm, results.told[arm]]).any()
    ]
    if not timed:
        return np.ones(len(points))
    totals = np.array([results.seconds[arm, results.told[arm]].sum() for arm in timed])
    logarithms = np.log(np.maximum(totals, SHORTEST_S))
    scale = Scale.of(logarithms)
    terms = design(points, 1)
    ridge = Ridge(terms[timed], scale.to_model(logarithms), 1.0)
    return np.asarray(np.exp(scale.centre + scale.spread * (terms @ ridge.theta)))
