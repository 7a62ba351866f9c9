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
"""Drawing jointly costs the cube of the arms."""

CANDIDATE_SDS = 3.0
"""Of more arms, those with the highest mean plus so many standard deviations are drawn."""


class Surfaces:
    """Joint draws over the open arms of a posterior as it is now.

    Of more than 600 open arms it knows the 600 with the highest bounds; the others are unlikely to
    be the best of any surface. Building takes 0.1 s at most, a draw a millisecond.
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
        """Shape (len(arms),): one surface."""
        normals = generator.standard_normal(len(self.arms))
        return np.asarray(self._mean + self._factor @ normals)
