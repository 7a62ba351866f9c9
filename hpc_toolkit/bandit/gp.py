"""Gaussian processes over the features of arms, and the rules that choose arms by them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, NamedTuple

import numpy as np

from hpc_toolkit.bandit import rule
from hpc_toolkit.bandit.arms import FEATURES, columns
from hpc_toolkit.bandit.policy import Bools, Floats, Pull

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
    return grid[rule.first_best(np.round(found, LIKELIHOOD_DECIMALS))]


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


EACH = "each"
SCALES = ("one", EACH)
"""What has a length scale of its own: all columns together, or each."""


def space_filling_order(points: Floats, seed: int, n: int) -> list[int]:
    """Return the indices of ``n`` points, each as far as possible from all before it.

    Greedy maximin design, known as farthest-point traversal (Gonzalez 1985, "Clustering to
    minimize the maximum intercluster distance"). The seed draws the first point; equal distances
    go to the lowest index. ``points`` has shape (n_points, n_columns). A larger ``n`` gives a
    longer list with the same beginning, up to all points.
    """
    count = min(n, len(points))
    if count == 0:
        return []
    order = [int(np.random.default_rng([seed, rule.Stream.FIRST_ARM]).integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(order) < count:
        newest = order[-1]
        nearest = np.minimum(nearest, ((points - points[newest]) ** 2).sum(axis=1))
        # Below every distance, even the distance 0 of a point with equal features.
        nearest[order] = -1.0
        order.append(rule.first_best(nearest))
    return order


def first_best_of(values: Floats, free: Bools) -> int:
    """Return the lowest index of the highest value, to 12 decimals, among free arms."""
    allowed = np.flatnonzero(free)
    return int(allowed[rule.first_best(values[allowed])])


SMALLEST_SD = 1e-9
"""Replaces smaller standard deviations: an exactly known reward would divide by 0."""

FAR_BELOW = -30.0
"""Below this z, erfc is about to underflow, and the series is exact to rounding."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True)
class GpRule(rule.Rule):
    """A rule that chooses by a Gaussian process over the arms' features.

    Every reward is evidence about the neighbours of its arm in feature space. So a reward that is
    smooth in the features needs far fewer pulls than arms. Arms without a reward are no evidence.
    The first arms are chosen by features alone.
    """

    initial: int = rule.number_option(5, low=1)
    """Number of arms chosen in space-filling order before the model decides."""
    features: str = rule.word_option("geometry", FEATURES)
    """The model's features: "geometry", "metrics" or "all" (see ``arms.columns``)."""
    scales: str = rule.word_option("one", SCALES)
    """Whether one length scale is fitted for all columns, or "each" column counts for itself."""

    def choose(self, history: rule.History, n: int) -> list[Pull]:
        wanted = min(n, len(history.table.arms) - len(history.taken))
        points = columns(history.table, self.features)
        opening = self._opening(history, points, wanted)
        ids = history.table.ids
        proposals = [Pull(ids[i]) for i in opening]
        if len(opening) < wanted:
            proposals += self._climb(history, points, opening, wanted - len(opening))
        return proposals

    def _opening(self, history: rule.History, points: Floats, n: int) -> list[int]:
        """Return the initial arms that are due; all ``n`` while there is no reward."""
        if history.scored:
            n = min(n, max(0, self.initial - len(history.scored) - len(history.pending)))
        if n == 0:
            return []
        order = space_filling_order(points, history.seed, n + len(history.taken))
        return [index for index in order if index not in history.taken][:n]

    def _climb(
        self, history: rule.History, points: Floats, opening: list[int], n: int
    ) -> list[Pull]:
        """Choose by a model ``n`` of the arms that are neither taken nor in ``opening``.

        The caller makes sure that there are at least ``n`` of these arms.
        """
        posterior = self._fitted(history, points)
        # Pending and chosen arms lower the uncertainty around them (kriging believer).
        for index in sorted((*history.pending, *opening)):
            posterior.believe(index)
        free = np.ones(len(points), dtype=np.bool_)
        free[[*history.taken, *opening]] = False
        proposals = []
        for _ in range(n):
            index = self._pick(history, posterior, free)
            proposals.append(Pull(history.table.ids[index]))
            free[index] = False
            posterior.believe(index)
        return proposals

    def _fitted(self, history: rule.History, points: Floats) -> Posterior:
        """The model of every arm, in units of standardised rewards."""
        centre, spread = float(history.rewards.mean()), float(history.rewards.std())
        # The spread of one reward, or of equal rewards, is rounding error.
        spread = 1.0 if spread <= 1e-12 * max(1.0, abs(centre)) else spread
        x, y = points[list(history.scored)], (history.rewards - centre) / spread
        if self.scales == EACH:
            scales = column_scales(x, y)
            x, points = x * scales, points * scales
        return Posterior(x, y, points, fit(x, y))

    @abstractmethod
    def _pick(self, history: rule.History, posterior: Posterior, free: Bools) -> int:
        """Return the arm to propose, of those that are ``free``: neither taken nor chosen."""


@dataclass(frozen=True, slots=True)
class GpUcb(GpRule):
    """Propose the arm with the highest mean plus ``beta`` standard deviations.

    Source: Srinivas et al. 2010. Pending arms, and arms chosen earlier in the same ask, only lower
    the uncertainty around them (kriging believer).
    """

    name: ClassVar[str] = "gp-ucb"
    beta: float = rule.number_option(2.0)
    """Standard deviations added to the mean; 0 never explores."""

    def _pick(self, history: rule.History, posterior: Posterior, free: Bools) -> int:
        return first_best_of(posterior.mean + self.beta * posterior.sd, free)


def log_expected_improvement(mean: Floats, sd: Floats, best: float) -> Floats:
    """Return log E[max(f - best, 0)] for f ~ N(mean, sd^2); ``mean`` and ``sd`` have one shape.

    The closed form is sd (phi(z) + z Phi(z)) with z = (mean - best) / sd (Jones, Schonlau and Welch
    1998). The logarithm still ranks arms far below the best, whose improvement underflows to 0.
    """
    sd = np.maximum(sd, SMALLEST_SD)
    z = np.asarray((mean - best) / sd, dtype=np.float64)
    log_density = -0.5 * z**2 - 0.5 * math.log(2.0 * math.pi)
    near = np.maximum(z, FAR_BELOW)
    direct = np.exp(-0.5 * near**2) / math.sqrt(2.0 * math.pi) + near * 0.5 * _erfc(
        -near / math.sqrt(2.0)
    )
    far = np.minimum(z, FAR_BELOW) ** -2
    # phi(z) + z Phi(z) = phi(z) z^-2 (1 - 3 z^-2 + 15 z^-4 - ...): Phi's asymptotic series.
    series = log_density + np.log(far * (1.0 - 3.0 * far + 15.0 * far**2))
    return np.asarray(np.where(z > FAR_BELOW, np.log(direct), series) + np.log(sd))


@dataclass(frozen=True, slots=True)
class GpEi(GpRule):
    """Propose the arm with the highest expected improvement (Jones, Schonlau and Welch 1998).

    The improvement is over the highest posterior mean among told and pending arms, so that noise in
    one score does not raise the bar. Pending arms count as observed at their mean (kriging
    believer).
    """

    name: ClassVar[str] = "gp-ei"

    def _pick(self, history: rule.History, posterior: Posterior, free: Bools) -> int:
        known = ~free  # told with a reward, pending, or chosen
        known[list(history.failed)] = False
        best = float(posterior.mean[known].max())
        improvement = log_expected_improvement(posterior.mean, posterior.sd, best)
        return first_best_of(improvement, free)
