"""Expected improvement of a Gaussian process over the arms' features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.rules.gp_search import GpRule
from hpc_toolkit.bandit.rules.guided import first_best_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.rules.gp_search import Ask

SMALLEST_SD = 1e-9
"""Replaces smaller standard deviations: an exactly known reward would divide by 0."""

FAR_BELOW = -30.0
"""Below this z, erfc is about to underflow, and the series is exact to rounding."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


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

    cost_power: float = 0.0
    """The improvement is divided by this power of the arm's expected seconds: 0 ignores durations,
    1 gives improvement per second (Snoek, Larochelle and Adams 2012). Expected durations are
    learned from told ones; without any, all arms cost the same."""

    def __post_init__(self) -> None:
        GpRule.__post_init__(self)
        hint = "a number, 0 or more; 1 is improvement per second"
        check_number(self.name, "cost_power", self.cost_power, low=0, hint=hint)

    def _pick(self, ask: Ask) -> tuple[int, float]:
        best = float(ask.posterior.mean[ask.known()].max())
        improvement = log_expected_improvement(ask.posterior.mean, ask.posterior.sd, best)
        value = improvement
        if self.cost_power:
            value = improvement - self.cost_power * np.log(ask.seconds)
        index = first_best_of(value, ask.free)
        return index, ask.scale.spread * math.exp(improvement[index])
