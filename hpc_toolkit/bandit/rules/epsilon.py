"""Epsilon-greedy over groups of arms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.bandit.draws import Stream, drawn
from hpc_toolkit.bandit.history import first_best
from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rules.levers import levers_of, unpulled

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


@dataclass(frozen=True, slots=True)
class EpsilonGreedy:
    """Pull the group with the highest mean reward, or with probability ``epsilon`` a random group.

    Pulling a group proposes its next arm, in an order drawn from the seed. Groups without a pull
    come first, in space-filling order of their mean features. Groups share no information: with
    more groups than budget, the rule is only a space-filling order.
    """

    name: ClassVar[str] = "epsilon-greedy"

    epsilon: float = 0.1
    """Probability of pulling a random group among the groups with free arms."""

    def __post_init__(self) -> None:
        hint = "a probability, from 0 to 1; 0.1 is usual"
        check_number(self.name, "epsilon", self.epsilon, low=0, high=1, hint=hint)

    def choose(self, history: History, n: int) -> list[Proposal]:
        levers = levers_of(history, lambda rewards: rewards)
        lowest = min(history.rewards, default=0.0)
        names = list(history.table.members)
        first = unpulled(history, levers)
        proposals: list[Proposal] = []
        while len(proposals) < n:
            candidates = [i for i, lever in enumerate(levers) if lever.free]
            if not candidates:
                break
            # A group without a reward yet counts as the lowest reward so far.
            means = [levers[i].mean if levers[i].rewards else lowest for i in candidates]
            mean = None
            generator = drawn(history, Stream.EPSILON, len(proposals))
            if first:
                chosen = first.pop(0)
                reason = f"first arm of {names[chosen]}"
            elif generator.random() < self.epsilon:
                chosen = candidates[int(generator.integers(len(candidates)))]
                reason = f"{names[chosen]} at random"
            else:
                best = first_best(means)
                chosen, mean = candidates[best], float(means[best])
                reason = f"mean of {names[chosen]} is {mean:.4g}"
            proposals.append(Proposal(history.table.ids[levers[chosen].free.pop(0)], mean, reason))
        return proposals
