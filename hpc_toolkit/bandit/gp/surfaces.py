"""Reward surfaces drawn from a Gaussian process, jointly over many arms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.gp.regression import cholesky
from hpc_toolkit.bandit.history import TIE_DECIMALS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.gp.regression import Posterior

MOST_CANDIDATES = 600
"""The most arms in a joint draw, whose cost is the cube of their number."""

CANDIDATE_SDS = 3.0
"""Of more arms, those with the highest mean plus this many standard deviations are drawn."""


class Surfaces:
    """Joint draws over the open arms, from the state of a posterior at construction.

    Of more than 600 open arms, only the 600 with the highest bounds are drawn; the others are
    unlikely to be the best of any surface. Construction takes at most 0.1 s, one draw 1 ms.
    """

    def __init__(self, posterior: Posterior, open_arms: NDArray[np.bool_]) -> None:
        bounds = np.round(posterior.mean + CANDIDATE_SDS * posterior.sd, TIE_DECIMALS)
        indices = np.flatnonzero(open_arms)
        order = np.argsort(-bounds[indices], kind="stable")
        self.arms: NDArray[np.intp] = np.sort(indices[order[:MOST_CANDIDATES]])
        """Ascending indices of the arms that are drawn."""
        self._mean = posterior.mean[self.arms]
        self._factor = cholesky(posterior.covariance(self.arms), 0.0)

    def draw(self, generator: np.random.Generator) -> NDArray[np.float64]:
        """Return shape (len(arms),): one surface."""
        normals = generator.standard_normal(len(self.arms))
        return np.asarray(self._mean + self._factor @ normals)
