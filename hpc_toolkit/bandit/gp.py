"""Gaussian process regression with a Matern-5/2 kernel, for some hundred observations.

Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 2.1. The prior
has mean 0 and variance 1, so scores are standardised before they come here. Time grows with the
cube of the observations: 300 of them and 5,000 points take about 0.1 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.history import first_best

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTH_SCALES = (0.2, 0.4, 0.8, 1.5, 3.0, 6.0)
"""Tried by ``fit``, in standard deviations of a feature."""

NOISES = (1e-4, 1e-3, 1e-2)
"""Tried by ``fit``: variance of the noise, in units of the prior's variance."""

LIKELIHOOD_DECIMALS = 9
"""Log likelihoods that agree to this many decimals are a tie."""

JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)
"""Added to the diagonal, one after the other, until the Cholesky factor exists."""


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What ``fit`` chooses."""

    length_scale: float
    """One for all columns."""

    noise: float
    """Variance of the noise on the diagonal."""


def matern52(
    left: NDArray[np.float64], right: NDArray[np.float64], length_scale: float
) -> NDArray[np.float64]:
    """Kernel matrix of shape (len(left), len(right)); its diagonal is 1 where both are equal."""
    square = np.zeros((len(left), len(right)))
    # Column by column: the expansion |a|^2 + |b|^2 - 2ab loses the digits of close points.
    for one, other in zip(left.T, right.T, strict=True):
        square += (one[:, None] - other[None, :]) ** 2
    scaled = np.sqrt(5.0 * square) / length_scale
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def log_marginal_likelihood(
    x: NDArray[np.float64], y: NDArray[np.float64], hyper: Hyperparameters
) -> float:
    """log p(y | x) for ``x`` of shape (n, d) and ``y`` of shape (n,)."""
    factor = cholesky(matern52(x, x, hyper.length_scale), hyper.noise)
    white = np.linalg.solve(factor, y)
    log_determinant = 2.0 * float(np.log(np.diag(factor)).sum())
    return -0.5 * (float(white @ white) + log_determinant + len(y) * math.log(2.0 * math.pi))


def fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> Hyperparameters:
    """The grid point with the highest marginal likelihood; ties go to the first."""
    grid = [Hyperparameters(*point) for point in product(LENGTH_SCALES, NOISES)]
    likelihoods = [log_marginal_likelihood(x, y, hyper) for hyper in grid]
    return grid[first_best(np.round(likelihoods, LIKELIHOOD_DECIMALS))]


def cholesky(kernel: NDArray[np.float64], noise: float) -> NDArray[np.float64]:
    """The lower factor of ``kernel`` plus noise, with as little jitter as it takes.

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
        factor = cholesky(matern52(x, x, hyper.length_scale), hyper.noise)
        self._hyper = hyper
        self._points = points
        covariance = matern52(x, points, hyper.length_scale)
        self._rows = np.asarray(np.linalg.solve(factor, covariance), np.float64)
        self.mean: NDArray[np.float64] = self._rows.T @ np.linalg.solve(factor, y)
        self.variance: NDArray[np.float64] = np.maximum(1.0 - _column_squares(self._rows), 0.0)

    @property
    def sd(self) -> NDArray[np.float64]:
        """Standard deviations, shape (len(points),)."""
        return np.sqrt(self.variance)

    def believe(self, index: int) -> None:
        """Condition on observing ``points[index]`` at its own mean (the kriging believer).

        Such an observation leaves every mean as it is and lowers the variance, for whatever value
        will be observed (Desautels, Krause and Burdick 2014, GP-BUCB); so the order of several
        does not matter.
        """
        point = self._points[index : index + 1]
        prior = matern52(point, self._points, self._hyper.length_scale)[0]
        covariance = prior - self._rows[:, index] @ self._rows
        spread = float(self.variance[index]) + self._hyper.noise
        # Without noise, nothing is left to learn at an observed point, and 0 / 0 must stay 0.
        row = covariance / math.sqrt(max(spread, JITTERS[1]))
        self._rows = np.vstack([self._rows, row])
        self.variance = np.maximum(self.variance - row**2, 0.0)


def _column_squares(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.einsum("ij,ij->j", rows, rows))
