"""Regression of rewards on the features of arms by a Gaussian process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import Floats
from hpc_toolkit.bandit.rule import first_best

JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)
"""Values to add to the diagonal, tried in order until the Cholesky factor exists."""

LENGTH_SCALES = (0.2, 0.4, 0.8, 1.5, 3.0, 6.0)
"""Candidates for one length scale of all columns, in standard deviations of a feature."""

NOISES = (1e-4, 1e-3, 1e-2)
"""Candidates for the variance of the noise, in units of the prior's variance."""

LIKELIHOOD_DECIMALS = 9
"""Log likelihoods that agree to this many decimals are a tie."""


def matern52(left: Floats, right: Floats, length_scale: float) -> Floats:
    """Return the kernel matrix of shape (len(left), len(right)); equal points have covariance 1."""
    square = np.zeros((len(left), len(right)))
    # Column by column: the expansion |a|^2 + |b|^2 - 2ab loses precision for close points.
    for one, other in zip(left.T, right.T, strict=True):
        square += (one[:, None] - other[None, :]) ** 2
    scaled = np.sqrt(5.0 * square) / length_scale
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


class Hyperparameters(NamedTuple):
    """The hyperparameters that ``fit`` chooses."""

    length_scale: float
    """Of all columns, in standard deviations of a feature."""
    noise: float
    """Variance of the noise on the diagonal."""


def cholesky(kernel: Floats, noise: float) -> Floats:
    """Return the lower Cholesky factor of ``kernel`` plus noise, with the least jitter that works.

    Raises numpy.linalg.LinAlgError for a matrix that is not finite or far from positive definite.
    """
    identity = np.eye(len(kernel))
    for jitter in JITTERS:
        try:
            return np.asarray(np.linalg.cholesky(kernel + (noise + jitter) * identity), np.float64)
        except np.linalg.LinAlgError:
            continue
    raise np.linalg.LinAlgError(f"a kernel matrix of {len(kernel)} points is not positive definite")


class Posterior:
    """The process at ``points``, given ``y`` observed at ``x``.

    ``mean`` and ``variance`` have shape (len(points),); the variance is that of the function,
    without noise, and never negative.
    """

    def __init__(self, x: Floats, y: Floats, points: Floats, hyper: Hyperparameters) -> None:
        self._hyper = hyper
        self._points = points
        factor = cholesky(matern52(x, x, hyper.length_scale), hyper.noise)
        cross = matern52(x, points, hyper.length_scale)
        self._rows = np.asarray(np.linalg.solve(factor, cross), np.float64)
        self.mean: Floats = self._rows.T @ np.linalg.solve(factor, y)
        self.variance: Floats = np.maximum(1.0 - np.einsum("ij,ij->j", self._rows, self._rows), 0.0)

    @property
    def sd(self) -> Floats:
        """Standard deviations, shape (len(points),)."""
        return np.sqrt(self.variance)

    def believe(self, index: int) -> None:
        """Condition on observing ``points[index]`` at its own mean (the kriging believer).

        This leaves every mean unchanged and lowers the variance, whatever value will be observed
        (Desautels, Krause and Burdick 2014, GP-BUCB); so the order of several calls does not
        matter.
        """
        point = self._points[index : index + 1]
        prior = matern52(point, self._points, self._hyper.length_scale)[0]
        covariance = prior - self._rows[:, index] @ self._rows
        spread = float(self.variance[index]) + self._hyper.noise
        # Without noise, the variance at an observed point is 0; the floor makes 0 / 0 give 0.
        row = covariance / math.sqrt(max(spread, JITTERS[1]))
        self._rows = np.vstack([self._rows, row])
        self.variance = np.maximum(self.variance - row**2, 0.0)


def log_marginal_likelihoods(x: Floats, y: Floats, tried: Sequence[Hyperparameters]) -> Floats:
    """Return log p(y | x) for each of ``tried``; ``x`` has shape (n, d) and ``y`` shape (n,)."""
    kernels = {scale: matern52(x, x, scale) for scale in {hyper.length_scale for hyper in tried}}
    stack = np.array([kernels[hyper.length_scale] for hyper in tried])
    noises = [hyper.noise for hyper in tried]
    try:
        diagonal = np.array(noises)[:, None, None] * np.eye(stack.shape[1])
        factors = np.asarray(np.linalg.cholesky(stack + diagonal), np.float64)
    except np.linalg.LinAlgError:
        # At least one matrix needs jitter; factor them singly, so that only that one gets it.
        factors = np.array([cholesky(one, noise) for one, noise in zip(stack, noises, strict=True)])
    white = np.linalg.solve(factors, np.broadcast_to(y[:, None], (len(tried), len(y), 1)))
    diagonals = np.diagonal(factors, axis1=1, axis2=2)
    log_determinants = 2.0 * np.log(diagonals).sum(axis=1)
    squares = (white[:, :, 0] ** 2).sum(axis=1)
    return np.asarray(-0.5 * (squares + log_determinants + len(y) * math.log(2.0 * math.pi)))


def fit(x: Floats, y: Floats) -> Hyperparameters:
    """Return the hyperparameters with the highest marginal likelihood on a grid of 18.

    Ties go to the first. A try takes as long as a posterior.
    """
    grid = [Hyperparameters(*pair) for pair in product(LENGTH_SCALES, NOISES)]
    found = log_marginal_likelihoods(x, y, grid)
    return grid[first_best(np.round(found, LIKELIHOOD_DECIMALS))]


STRETCHES = (0.25, 0.5, 2.0, 4.0)
"""Factors by which the scale of one column is changed at a time."""

MOST_STRETCHED = 16.0
"""No column counts more than this many times as much, or as little, as at first."""

PENALTY = 1.0
"""Log likelihood that a change of one column's scale by a factor of 2 must gain.

Without it, the first few rewards would single out columns by chance: on recorded scores of layers
the number of arms until the best rose from 10 to 16.
"""


def column_scales(x: Floats, y: Floats) -> Floats:
    """Return a factor for each column of ``x``: how much its differences count.

    Coordinate ascent from 1, in two sweeps over the columns, on the marginal likelihood with the
    noise of :func:`fit` and the best length scale, less :data:`PENALTY`. Ties go to the first.
    """
    noise = fit(x, y).noise
    hyper = [Hyperparameters(length_scale, noise) for length_scale in LENGTH_SCALES]

    def value(scales: Floats) -> float:
        gain = log_marginal_likelihoods(x * scales, y, hyper).max()
        return round(float(gain - PENALTY * np.abs(np.log2(scales)).sum()), LIKELIHOOD_DECIMALS)

    scales = np.ones(x.shape[1])
    best = value(scales)
    for column in (*range(len(scales)), *range(len(scales))):
        for stretch in STRETCHES:
            tried = scales.copy()
            tried[column] *= stretch
            if 1 / MOST_STRETCHED <= tried[column] <= MOST_STRETCHED:
                found = value(tried)
                if found > best:
                    best, scales = found, tried
    return scales
