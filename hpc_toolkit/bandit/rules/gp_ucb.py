"""Upper confidence bound of a Gaussian process over the arms' features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.rules.gp_search import GpRule
from hpc_toolkit.bandit.rules.guided import first_best_of

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rules.gp_search import Ask


@dataclass(frozen=True, slots=True)
class GpUcb(GpRule):
    """Propose the arm with the highest mean plus ``beta`` standard deviations.

    Source: Srinivas et al. 2010. Pending arms, and arms chosen earlier in the same ask, only lower
    the uncertainty around them (kriging believer).
    """

    name: ClassVar[str] = "gp-ucb"

    beta: float = 2.0
    """Standard deviations added to the mean; 0 never explores."""

    def __post_init__(self) -> None:
        GpRule.__post_init__(self)
        check_number(self.name, "beta", self.beta, low=0, hint="a number, 0 or more; 2 is usual")

    def _pick(self, ask: Ask) -> tuple[int, float]:
        bounds = ask.posterior.mean + self.beta * ask.posterior.sd
        index = first_best_of(bounds, ask.free)
        return index, ask.scale.to_reward(bounds[index])
