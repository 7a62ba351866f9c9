"""Regression of rewards on the features of arms: Gaussian processes and ridge regression."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.rule import TIE_DECIMALS, first_best

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)
"""Values to add to the diagonal, tried in order until the Cholesky factor exists."""

LENGTH_SCALES = (0.2, 0.4, 0.8, 1.5, 3.0, 6.0)
"""Candidates for one length scale of all columns, in standard deviations of a feature."""

OWN_LENGTH_SCALES = (*LENGTH_SCALES, math.inf)
"""Candidates for the length scale of a single column; infinity ignores the column."""

NOISES = (1e-4, 1e-3, 1e-2)
"""Candidates for the variance of the noise, in units of the prior's variance."""

SLOPES = (0.01, 0.1, 1.0)
"""Candidates for the prior variance of a slope, if there is a linear mean."""

LIKELIHOOD_DECIMALS = 9
"""Log likelihoods that agree to this many decimals are a tie."""

SWEEPS = 5
"""The most rounds of optimising each column's own length scale."""

MOST_CANDIDATES = 600
"""The most arms in a joint draw, whose cost is the cube of their number."""

CANDIDATE_SDS = 3.0
"""Of more arms, those with the highest mean plus this many standard deviations are drawn."""


def matern52(
    left: NDArray[np.float64], right: NDArray[np.float64], length_scale: float
) -> NDArray[np.float64]:
    """Return the kernel matrix of shape (len(left), len(right)); equal points have covariance 1."""
    square = np.zeros((len(left), len(right)))
    # Column by column: the expansion |a|^2 + |b|^2 - 2ab loses precision for close points.
    for one, other in zip(left.T, right.T, strict=True):
        square += (one[:, None] - other[None, :]) ** 2
    scaled = np.sqrt(5.0 * square) / length_scale
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Matern-5/2 kernel of variance 1, plus the kernel of a linear function of unknown slopes:

        k(a, b) = m(|(a - b) / length_scales|) + slope * sum_j a_j b_j

    with m(r) = (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r). The second part is a linear mean whose
    slopes have a normal prior of variance ``slope`` (Rasmussen and Williams 2006, section 2.7).
    This is a ridge regression whose uncertainty is part of the posterior.
    """

    length_scales: tuple[float, ...]
    """In standard deviations of a feature: one for all columns, or one for each, which lets less
    relevant features have longer scales (automatic relevance determination). Infinite: the column
    is left out."""
    slope: float = 0.0
    """Prior variance of the slope of every column; 0 leaves the linear part out."""

    def between(self, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (len(left), len(right)), for points of shape (n, n_columns)."""
        if len(self.length_scales) == 1:
            covariance = matern52(left, right, self.length_scales[0])
        else:
            scales = np.array(self.length_scales)
            covariance = matern52(left / scales, right / scales, 1.0)
        return covariance + self.slope * (left @ right.T) if self.slope else covariance

    def variances(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (len(points),): ``k(a, a)``."""
        ones = np.ones(len(points))
        return ones + self.slope * (points**2).sum(axis=1) if self.slope else ones


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters that ``fit`` chooses."""

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
            kernel.variances(points) - np.einsum("ij,ij->j", self._rows, self._rows), 0.0
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


def log_marginal_likelihoods(
    x: NDArray[np.float64], y: NDArray[np.float64], tried: Sequence[Hyperparameters]
) -> NDArray[np.float64]:
    """Return log p(y | x) for each of ``tried``; ``x`` has shape (n, d) and ``y`` shape (n,)."""
    kernels = {hyper.kernel: hyper.kernel.between(x, x) for hyper in tried}
    stack = np.array([kernels[hyper.kernel] for hyper in tried])
    factors = _factors(stack, [hyper.noise for hyper in tried])
    white = np.linalg.solve(factors, np.broadcast_to(y[:, None], (len(tried), len(y), 1)))
    diagonals = np.diagonal(factors, axis1=1, axis2=2)
    log_determinants = 2.0 * np.log(diagonals).sum(axis=1)
    squares = (white[:, :, 0] ** 2).sum(axis=1)
    return np.asarray(-0.5 * (squares + log_determinants + len(y) * math.log(2.0 * math.pi)))


def fit(
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    *,
    smooth: Sequence[int] | None = None,
    own_scales: bool = False,
    linear: bool = False,
) -> Hyperparameters:
    """Return the hyperparameters with the highest marginal likelihood on a grid.

    Ties go to the first. ``smooth`` are the columns of the Matern part, by default all. The first
    step chooses one length scale for all of them. With ``own_scales``, further steps choose each
    column's own scale, the slope and the noise in turn while the likelihood rises, up to a local
    maximum of the grid. ``linear`` adds a linear mean over all columns. A try takes as long as a
    posterior: 18 tries, or 54 with ``linear``, and with ``own_scales`` up to 5 times (7 per
    column, and 6) more.
    """
    columns = x.shape[1]
    used = range(columns) if smooth is None else smooth
    shared = len(used) == columns and not own_scales
    slopes = SLOPES if linear else (0.0,)
    grid = []
    for scale, slope, noise in product(LENGTH_SCALES, slopes, NOISES):
        own = tuple(scale if column in used else math.inf for column in range(columns))
        grid.append(Hyperparameters(Kernel((scale,) if shared else own, slope), noise))
    best, likelihood = _likeliest(x, y, grid)
    axes: list[int | str] = [*used, "slope", "noise"]
    for _ in range(SWEEPS if own_scales else 0):
        before = likelihood
        for axis in axes:
            best, likelihood = _likeliest(x, y, [best, *_along(axis, best, slopes)])
        if likelihood <= before:
            break
    return best


def _along(
    axis: int | str, hyper: Hyperparameters, slopes: Sequence[float]
) -> list[Hyperparameters]:
    """Return variants of a point of the grid: in the scale of a column, the slope or the noise."""
    if axis == "noise":
        return [replace(hyper, noise=noise) for noise in NOISES]
    if axis == "slope":
        kernels = [replace(hyper.kernel, slope=slope) for slope in slopes]
    else:
        kernels = []
        for scale in OWN_LENGTH_SCALES:
            scales = list(hyper.kernel.length_scales)
            scales[int(axis)] = scale
            kernels.append(replace(hyper.kernel, length_scales=tuple(scales)))
    return [replace(hyper, kernel=kernel) for kernel in kernels]


def _factors(stack: NDArray[np.float64], noises: Sequence[float]) -> NDArray[np.float64]:
    """Return the Cholesky factors of kernel matrices plus noise, in the shape of ``stack``."""
    noise = np.array(noises)[:, None, None] * np.eye(stack.shape[1])
    try:
        return np.asarray(np.linalg.cholesky(stack + noise), np.float64)
    except np.linalg.LinAlgError:
        # At least one matrix needs jitter; factor them singly, so that only that one gets it.
        return np.array([cholesky(one, level) for one, level in zip(stack, noises, strict=True)])


def _likeliest(
    x: NDArray[np.float64], y: NDArray[np.float64], tried: Sequence[Hyperparameters]
) -> tuple[Hyperparameters, float]:
    found = np.round(log_marginal_likelihoods(x, y, tried), LIKELIHOOD_DECIMALS)
    best = first_best(found)
    return tried[best], float(found[best])


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


def design(points: NDArray[np.float64], degree: int) -> NDArray[np.float64]:
    """Return shape (n_points, n_terms): 1, the columns, and for degree 2 squares and products.

    Every term except the first has mean 0 and standard deviation 1 over the points; terms that are
    constant over the points are left out.
    """
    terms = list(points.T)
    if degree > 1:
        first, second = np.triu_indices(points.shape[1])
        terms += [points[:, i] * points[:, j] for i, j in zip(first, second, strict=True)]
    kept = [np.ones(len(points))]
    for term in terms:
        centred = term - term.mean()
        deviation = centred.std()
        if deviation > 1e-12:
            kept.append(centred / deviation)
    return np.array(kept).T


class Ridge:
    """Posterior of a parameter vector by ridge regression: N(theta, A^-1) in units of the noise.

    A = ridge I + X' X and theta = A^-1 X' y, by Cholesky factors of A (d x d, d a few dozen).
    """

    def __init__(self, x: NDArray[np.float64], y: NDArray[np.float64], ridge: float) -> None:
        self._precision = ridge * np.eye(x.shape[1]) + x.T @ x
        self._factor = np.linalg.cholesky(self._precision)
        self.theta: NDArray[np.float64] = np.linalg.solve(
            self._factor.T, np.linalg.solve(self._factor, x.T @ y)
        )

    def sd(self, points: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return shape (n_points,): sqrt(x' A^-1 x)."""
        white = np.linalg.solve(self._factor, points.T)
        return np.asarray(np.sqrt((white**2).sum(axis=0)))
