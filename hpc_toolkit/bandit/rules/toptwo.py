"""Top-two sampling with a Gaussian process over the arms' features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.rules.gp_ei import log_expected_improvement
from hpc_toolkit.bandit.rules.gp_search import GpRule
from hpc_toolkit.bandit.rules.guided import first_best_of

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rules.gp_search import Ask


@dataclass(frozen=True, slots=True)
class TopTwo(GpRule):
    """The arm that leads, or the challenger that is expected to beat it by most.

    The leader has the highest posterior mean of all arms, told ones included. A coin decides
    whether it is asked for, as long as it may be; otherwise the challenger is: the free arm of the
    highest E[max(f_arm - f_leader, 0)], by the joint posterior of the two, so that neighbours of
    the leader, which rise and fall with it, gain less than by ``gp-ei``. Top-two sampling (Russo
    2016) with the improvement of Qin, Klabjan and Russo 2017 over an empirical leader (Jourdan et
    al. 2022). Pending arms count as observed at their mean (kriging believer).
    """

    name: ClassVar[str] = "top-two"

    leader: float = 0.5
    """Probability of asking for the leader."""

    def __post_init__(self) -> None:
        GpRule.__post_init__(self)
        hint = "a probability, from 0 to 1; 0.5 is usual"
        check_number(self.name, "leader", self.leader, low=0, high=1, hint=hint)

    def _pick(self, ask: Ask) -> tuple[int, float]:
        posterior = ask.posterior
        leader = first_best_of(posterior.mean, ask.free | ask.known())
        lead = float(posterior.mean[leader])
        if ask.free[leader] and ask.generator(Stream.TOP_TWO).random() < self.leader:
            return leader, ask.scale.to_reward(lead)
        rivals = ask.free.copy()
        rivals[leader] = False
        if not rivals.any():
            return leader, ask.scale.to_reward(lead)
        both = posterior.variance + posterior.variance[leader]
        apart = np.maximum(both - 2.0 * posterior.covariance_with(leader), 0.0)
        improvement = log_expected_improvement(posterior.mean, np.sqrt(apart), lead)
        index = first_best_of(improvement, rivals)
        return index, ask.scale.spread * math.exp(improvement[index])
