"""Thompson sampling over groups of arms, each with a normal reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.draws import Stream, drawn
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rules.guided import Scale, first_best_of
from hpc_toolkit.bandit.rules.levers import levers_of

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


@dataclass(frozen=True, slots=True)
class GaussianTs:
    """Pull the group with the highest mean reward, by a draw from the posterior of every mean.

    For a group with ``k`` rewards of sum ``t``, standardised over all rewards, the draw is from
    N(t / (k + 1), 1 / (k + 1)) (Agrawal and Goyal 2013, normal priors). Pulling a group proposes
    its next arm, in an order drawn from the seed. Groups share no information.
    """

    name: ClassVar[str] = "gaussian-ts"

    def choose(self, history: History, n: int) -> list[Proposal]:
        scale = Scale.of(history.rewards) if history.scored else Scale(0.0, 1.0)
        levers = levers_of(history, scale.to_model)
        names = list(history.table.members)
        centres = np.array([lever.total / (lever.rewards + 1) for lever in levers])
        deviations = np.array([1.0 / math.sqrt(lever.rewards + 1) for lever in levers])
        proposals: list[Proposal] = []
        while len(proposals) < n:
            free = np.array([bool(lever.free) for lever in levers])
            if not free.any():
                break
            generator = drawn(history, Stream.GROUP_SAMPLE, len(proposals))
            draws = centres + deviations * generator.standard_normal(len(levers))
            chosen = first_best_of(draws, free)
            value = scale.to_reward(draws[chosen])
            reason = f"a draw of the mean of {names[chosen]} is {value:.4g}"
            proposals.append(Proposal(history.table.ids[levers[chosen].free.pop(0)], value, reason))
        return proposals
