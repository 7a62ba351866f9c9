"""Gaussian process regression, for a few hundred observations.

Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1. The prior
has mean 0 and a Matern part of variance 1, so callers standardise the scores. Time grows with the
cube of the number of observations: 300 of them and 5,000 points take about 0.1 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.gp.kernels import Kernel

JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)
"""Values to add to the diagonal, tried in order until the Cholesky factor exists."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters that ``evidence.fit`` chooses."""

    kernel: Kernel

    noise: float
    """Variance of the noise on the diagonal."""


def cholesky(kernel: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """Return the lower Cholesky factor of ``kernel`` plus noise, with the least jitter that works.

    Raises numpy.linalg.LinAlgError for a matrix that is not finite or far from positive definite.
    """
    identity = np.eye(len(kernel))
    for jitter in JITTERS:
        try:
            return np.asarray(np.linalg.cholesky(kernel + (noise + jitter) * identity), np.float64)
        except np.linalg.LinAlgError:
            continue
    message = f"a kernel matrix of {len(kernel)} points is not positive definite"
    raise np.linalg.LinAlgError(message)


class Posterior:
    """The process at ``points``, given ``y`` observed at ``x``.

    ``mean`` and ``variance`` have shape (len(points),); the variance is that of the function,
    without noise, and never negative.
    """

    def __init__(
        self,
        x: NDArray[np.float64],
        y: NDArray[np.float64],
        points: NDArray[np.float64],
        hyper: Hyperparameters,
    ) -> None:
        kernel = hyper.kernel
        factor = cholesky(kernel.between(x, x), hyper.noise)
        self._hyper = hyper
        self._points = points
        self._rows = np.asarray(np.linalg.solve(factor, kernel.between(x, points)), np.float64)
        self.mean: NDArray[np.float64] = self._rows.T @ np.linalg.solve(factor, y)
        self.variance: NDArray[np.float64] = np.maximum(
            kernel.variances(points) - _column_squares(self._rows), 0.0
        )

    @property
    def sd(self) -> NDArray[np.float64]:
        """Standard deviations, shape (len(points),)."""
        return np.sqrt(self.variance)

    def covariance_with(self, index: int) -> NDArray[np.float64]:
        """Return shape (len(points),): the covariance of every point with one of them."""
        point = self._points[index : index + 1]
        prior = self._hyper.kernel.between(point, self._points)[0]
        return np.asarray(prior - self._rows[:, index] @ self._rows)

    def covariance(self, indices: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return shape (len(indices), len(indices)): the covariance among some of the points."""
        points, rows = self._points[indices], self._rows[:, indices]
        return np.asarray(self._hyper.kernel.between(points, points) - rows.T @ rows)

    def believe(self, index: int) -> None:
        """Condition on observing ``points[index]`` at its own mean (the kriging believer).

        This leaves every mean unchanged and lowers the variance, whatever value will be observed
        (Desautels, Krause and Burdick 2014, GP-BUCB); so the order of several calls does not
        matter.
        """
        covariance = self.covariance_with(index)
        spread = float(self.variance[index]) + self._hyper.noise
        # Without noise, the variance at an observed point is 0; the floor makes 0 / 0 give 0.
        row = covariance / math.sqrt(max(spread, JITTERS[1]))
        self._rows = np.vstack([self._rows, row])
        self.variance = np.maximum(self.variance - row**2, 0.0)


def _column_squares(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.einsum("ij,ij->j", rows, rows))
