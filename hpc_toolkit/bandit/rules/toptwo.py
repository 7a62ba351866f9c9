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
    """Propose the leader, or the challenger with the highest expected improvement over it.

    The leader is the arm with the highest posterior mean, told arms included. If it is free, a coin
    decides whether to propose it; otherwise the rule proposes the challenger. This is the free arm
    with the highest E[max(f_arm - f_leader, 0)] by the joint posterior of the two, so neighbours of
    the leader, which rise and fall with it, gain less than by ``gp-ei``. It is top-two sampling
    (Russo 2016) with the improvement of Qin, Klabjan and Russo 2017 over an empirical leader
    (Jourdan et al. 2022). Pending arms count as observed at their mean (kriging believer).
    """

    name: ClassVar[str] = "top-two"

    leader: float = 0.5
    """Probability of proposing the leader."""

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
