"""UCB1 over groups of arms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.bandit.history import first_best
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rules.levers import levers_of, to_unit_interval, unpulled

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History
    from hpc_toolkit.bandit.rules.levers import Lever


@dataclass(frozen=True, slots=True)
class Ucb1:
    """Classic UCB1 (Auer, Cesa-Bianchi and Fischer 2002) whose levers are the groups of the table.

    Pulling a group proposes its next arm, in an order drawn from the seed. Groups without a pull
    come first, in space-filling order of their mean features; pending arms count as pulled.
    Rewards are rescaled by the lowest and highest seen, since UCB1 assumes [0, 1].

    Groups share no information: with more groups than budget, or with one arm per group, the rule
    is only a space-filling order.
    """

    name: ClassVar[str] = "ucb1"

    def choose(self, history: History, n: int) -> list[Proposal]:
        levers = levers_of(history, to_unit_interval)
        names = list(history.table.members)
        first = unpulled(history, levers)
        proposals: list[Proposal] = []
        while len(proposals) < n:
            bound = None
            if first:
                chosen = first.pop(0)
                reason = f"first arm of {names[chosen]}"
            else:
                chosen, bound = _highest_bound(levers)
                if bound is None:
                    break
                reason = f"upper confidence bound of {names[chosen]} is {bound:.4g}"
            lever = levers[chosen]
            proposals.append(Proposal(history.table.ids[lever.free.pop(0)], bound, reason))
            lever.pulls += 1
        return proposals


def _highest_bound(levers: list[Lever]) -> tuple[int, float | None]:
    """Return the lever to pull next and its bound; None as the bound when all arms are taken.

    A lever without a reward yet counts as the lowest reward so far.
    """
    pulls = sum(lever.pulls for lever in levers)
    bounds = [
        lever.mean + math.sqrt(2.0 * math.log(pulls) / lever.pulls) if lever.free else -math.inf
        for lever in levers
    ]
    chosen = first_best(bounds)
    return chosen, bounds[chosen] if levers[chosen].free else None
