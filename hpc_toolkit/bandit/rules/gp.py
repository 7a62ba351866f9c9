"""Rules that choose by a Gaussian process over the arms' features."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.regression import Posterior, Surfaces, fit
from hpc_toolkit.bandit.rule import Stream, drawn, number_option
from hpc_toolkit.bandit.rules.guided import Guided, Scale, first_best_of, free_arms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rule import History


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
    scale: Scale
    free: NDArray[np.bool_]
    """Shape (n_arms,): True for arms that are neither taken nor chosen."""
    chosen: int
    """How many arms this ask has chosen already."""

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

    believes: ClassVar[bool] = True
    """Whether pending arms, and those chosen earlier in an ask, lower the uncertainty around them
    (kriging believer)."""

    def _climb(
        self, history: History, points: NDArray[np.float64], opening: list[int], n: int
    ) -> list[Proposal]:
        scale = Scale.of(history.rewards)
        x, y = points[list(history.scored)], scale.to_model(history.rewards)
        posterior = Posterior(x, y, points, fit(x, y))
        if self.believes:
            for index in sorted((*history.pending, *opening)):
                posterior.believe(index)
        ask = Ask(history, posterior, scale, free_arms(history, opening), len(opening))
        proposals = []
        for _ in range(n):
            index, acquisition = self._pick(ask)
            reason = scale.expects(posterior.mean[index], posterior.sd[index])
            proposals.append(Proposal(history.table.ids[index], acquisition, reason))
            ask.free[index] = False
            ask.chosen += 1
            if self.believes:
                posterior.believe(index)
        return proposals

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
        return index, ask.scale.to_reward(bounds[index])


def log_expected_improvement(
    mean: NDArray[np.float64], sd: NDArray[np.float64], best: float
) -> NDArray[np.float64]:
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
        return index, ask.scale.spread * math.exp(improvement[index])


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
        return index, ask.scale.to_reward(surface[index])
