"""Rules that learn from features: the initial arms, and choices by a Gaussian process."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.arms import FEATURES, columns
from hpc_toolkit.bandit.policy import Bools, Floats, Proposal
from hpc_toolkit.bandit.regression import Posterior, Surfaces, column_scales, fit
from hpc_toolkit.bandit.rule import Rule, Stream, drawn, first_best, number_option, word_option

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rule import History


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
    order = [int(np.random.default_rng([seed, Stream.FIRST_ARM]).integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(order) < count:
        newest = order[-1]
        nearest = np.minimum(nearest, ((points - points[newest]) ** 2).sum(axis=1))
        # Below every distance, even the distance 0 of a point with equal features.
        nearest[order] = -1.0
        order.append(first_best(nearest))
    return order


@dataclass(frozen=True, slots=True)
class Guided(Rule):
    """A rule that chooses its first arms by features alone, and then lets a model choose."""

    initial: int = number_option(5, low=1)
    """Number of arms chosen in space-filling order before the model decides."""
    features: str = word_option("geometry", FEATURES)
    """The model's features: "geometry", "metrics" or "all" (see ``arms.columns``)."""

    def choose(self, history: History, n: int) -> list[Proposal]:
        wanted = min(n, len(history.table.arms) - len(history.taken))
        points = columns(history.table, self.features)
        opening = self._opening(history, points, wanted)
        ids = history.table.ids
        proposals = [Proposal(ids[i], None, "space-filling initial arm") for i in opening]
        if len(opening) < wanted:
            proposals += self._climb(history, points, opening, wanted - len(opening))
        return proposals

    def _opening(self, history: History, points: Floats, n: int) -> list[int]:
        """Return the initial arms that are due; all ``n`` while there is no reward."""
        if history.scored:
            n = min(n, max(0, self.initial - len(history.scored) - len(history.pending)))
        if n == 0:
            return []
        order = space_filling_order(points, history.seed, n + len(history.taken))
        return [index for index in order if index not in history.taken][:n]

    @abstractmethod
    def _climb(
        self, history: History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        """Choose by a model ``n`` of the arms that are neither taken nor in ``opening``.

        The caller makes sure that there are at least ``n`` of these arms.
        """


def free_arms(history: History, opening: list[int]) -> Bools:
    """Return shape (n_arms,): True for arms that may still be proposed."""
    free = np.ones(len(history.table.arms), dtype=np.bool_)
    free[[*history.taken, *opening]] = False
    return free


def first_best_of(values: Floats, free: Bools) -> int:
    """Return the lowest index of the highest value, to 12 decimals, among free arms."""
    allowed = np.flatnonzero(free)
    return int(allowed[first_best(values[allowed])])


SMALLEST_SD = 1e-9
"""Replaces smaller standard deviations: an exactly known reward would divide by 0."""

FAR_BELOW = -30.0
"""Below this z, erfc is about to underflow, and the series is exact to rounding."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(eq=False)
class Ask:
    """The state of one ask: the model of every arm, in units of standardised rewards."""

    history: History
    posterior: Posterior
    centre: float
    spread: float
    """Mean and standard deviation of the told rewards."""
    free: Bools
    """Shape (n_arms,): True for arms that are neither taken nor chosen."""
    chosen: int
    """How many arms this ask has chosen already."""

    def to_reward(self, value: float) -> float:
        return self.centre + self.spread * float(value)

    @cached_property
    def surfaces(self) -> Surfaces:
        """Draws over the arms without results, from the posterior at the first use."""
        untold = np.ones(len(self.free), dtype=np.bool_)
        untold[[*self.history.scored, *self.history.failed]] = False
        return Surfaces(self.posterior, untold)


@dataclass(frozen=True, slots=True)
class GpRule(Guided):
    """A rule that chooses by a Gaussian process over the arms' features.

    Every reward is evidence about the neighbours of its arm in feature space. So a reward that is
    smooth in the features needs far fewer pulls than arms. Arms without a reward are no evidence.
    """

    scales: str = word_option("one", SCALES)
    """Whether one length scale is fitted for all columns, or "each" column counts for itself."""

    believes: ClassVar[bool] = True
    """Whether pending arms, and those chosen earlier in an ask, lower the uncertainty around them
    (kriging believer)."""

    def _climb(
        self, history: History, points: Floats, opening: list[int], n: int
    ) -> list[Proposal]:
        posterior, centre, spread = self._fitted(history, points)
        if self.believes:
            for index in sorted((*history.pending, *opening)):
                posterior.believe(index)
        free = free_arms(history, opening)
        ask = Ask(history, posterior, centre, spread, free, len(opening))
        proposals = []
        for _ in range(n):
            index, acquisition = self._pick(ask)
            mean, sd = ask.to_reward(posterior.mean[index]), spread * float(posterior.sd[index])
            reason = f"expects {mean:.4g} +- {sd:.2g}"
            proposals.append(Proposal(history.table.ids[index], acquisition, reason))
            ask.free[index] = False
            ask.chosen += 1
            if self.believes:
                posterior.believe(index)
        return proposals

    def _fitted(self, history: History, points: Floats) -> tuple[Posterior, float, float]:
        """The model of every arm, and the mean and the standard deviation of the told rewards."""
        centre, spread = float(history.rewards.mean()), float(history.rewards.std())
        # The spread of one reward, or of equal rewards, is rounding error.
        spread = 1.0 if spread <= 1e-12 * max(1.0, abs(centre)) else spread
        x, y = points[list(history.scored)], (history.rewards - centre) / spread
        if self.scales == EACH:
            scales = column_scales(x, y)
            x, points = x * scales, points * scales
        return Posterior(x, y, points, fit(x, y)), centre, spread

    @abstractmethod
    def _pick(self, ask: Ask) -> tuple[int, float]:
        """Return the free arm to propose, and its acquisition in units of the reward."""


@dataclass(frozen=True, slots=True)
class GpUcb(GpRule):
    """Propose the arm with the highest mean plus ``beta`` standard deviations.

    Source: Srinivas et al. 2010. Pending arms, and arms chosen earlier in the same ask, only lower
    the uncertainty around them (kriging believer).
    """

    name: ClassVar[str] = "gp-ucb"
    beta: float = number_option(2.0)
    """Standard deviations added to the mean; 0 never explores."""

    def _pick(self, ask: Ask) -> tuple[int, float]:
        bounds = ask.posterior.mean + self.beta * ask.posterior.sd
        index = first_best_of(bounds, ask.free)
        return index, ask.to_reward(bounds[index])


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

    def _pick(self, ask: Ask) -> tuple[int, float]:
        known = ~ask.free  # told with a reward, pending, or chosen
        known[list(ask.history.failed)] = False
        best = float(ask.posterior.mean[known].max())
        improvement = log_expected_improvement(ask.posterior.mean, ask.posterior.sd, best)
        index = first_best_of(improvement, ask.free)
        return index, ask.spread * math.exp(improvement[index])


@dataclass(frozen=True, slots=True)
class GpTs(GpRule):
    """Propose the best arm of a reward surface drawn from the posterior, a new one per proposal.

    Surfaces are drawn over all arms without results, or over the 600 with the highest bounds.
    Pending arms do not change the posterior: draws differ by themselves (Kandasamy et al. 2018).
    """

    name: ClassVar[str] = "gp-ts"
    believes: ClassVar[bool] = False

    def _pick(self, ask: Ask) -> tuple[int, float]:
        # Surfaces include pending arms, so that they do not depend on which arms are pending.
        surface = np.full(len(ask.free), -np.inf)
        generator = drawn(ask.history, Stream.GP_SAMPLE, ask.chosen)
        surface[ask.surfaces.arms] = ask.surfaces.draw(generator)
        if not ask.free[ask.surfaces.arms].any():
            surface = ask.posterior.mean
        index = first_best_of(surface, ask.free)
        return index, ask.to_reward(surface[index])
