"""UCB1 over groups of arms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.history import first_best
from hpc_toolkit.bandit.initial import space_filling_order
from hpc_toolkit.bandit.policy import Proposal

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History

WITHIN_GROUPS = 1
"""Names the random stream that orders the arms of a group: ``default_rng([seed, WITHIN_GROUPS])``.
"""


@dataclass(slots=True)
class _Group:
    """One lever of the bandit: a group of arms."""

    free: list[int]
    """Arms that may still be proposed, in the seed's order."""

    pulls: int
    """Arms told, failed or pending."""

    total: float
    """Sum of the rewards, each rescaled to [0, 1]."""

    rewards: int
    """How many arms have a reward."""

    def bound(self, pulls: int) -> float:
        """The upper confidence bound. A group without a reward yet counts as the worst seen."""
        mean = self.total / self.rewards if self.rewards else 0.0
        return mean + math.sqrt(2.0 * math.log(pulls) / self.pulls)


@dataclass(frozen=True, slots=True)
class Ucb1:
    """Classic UCB1 (Auer, Cesa-Bianchi and Fischer 2002) whose levers are the groups of the table.

    To pull a group is to propose its next arm in an order that the seed decides. Groups without a
    pull come first, in space-filling order of their mean features; pending arms count as pulled.
    Rewards are rescaled by the lowest and highest seen, since UCB1 assumes [0, 1].

    It shares nothing between groups: with more groups than budget, or with one arm per group, it
    is a space-filling order and no search.
    """

    name: ClassVar[str] = "ucb1"

    def choose(self, history: History, n: int) -> list[Proposal]:
        groups = _groups(history)
        names = list(history.table.members)
        unpulled = [g for g in _group_order(history) if not groups[g].pulls]
        proposals: list[Proposal] = []
        while len(proposals) < n:
            bound = None
            if unpulled:
                chosen = unpulled.pop(0)
                reason = f"first arm of {names[chosen]}"
            else:
                chosen, bound = _highest_bound(groups)
                if bound is None:
                    break
                reason = f"upper confidence bound of {names[chosen]} is {bound:.4g}"
            group = groups[chosen]
            proposals.append(Proposal(history.table.ids[group.free.pop(0)], bound, reason))
            group.pulls += 1
        return proposals


def _highest_bound(groups: list[_Group]) -> tuple[int, float | None]:
    """The group to pull next and its bound; None when all arms are taken."""
    pulls = sum(group.pulls for group in groups)
    bounds = [group.bound(pulls) if group.free else -math.inf for group in groups]
    chosen = first_best(bounds)
    return chosen, bounds[chosen] if groups[chosen].free else None


def _groups(history: History) -> list[_Group]:
    order = np.random.default_rng([history.seed, WITHIN_GROUPS]).permutation(
        len(history.table.arms)
    )
    place = np.argsort(order)
    reward_of = dict(zip(history.scored, _rescaled(history.rewards), strict=True))
    groups = []
    for members in history.table.members.values():
        rewards = [reward_of[i] for i in members if i in reward_of]
        free = [i for i in members if i not in history.taken]
        groups.append(
            _Group(
                free=sorted(free, key=lambda i: int(place[i])),
                pulls=len(members) - len(free),
                total=math.fsum(rewards),
                rewards=len(rewards),
            )
        )
    return groups


def _rescaled(rewards: np.ndarray) -> list[float]:
    if not rewards.size:
        return []
    low, high = float(rewards.min()), float(rewards.max())
    return [(float(reward) - low) / (high - low) if high > low else 0.0 for reward in rewards]


def _group_order(history: History) -> list[int]:
    points = history.table.standardised.values
    centres = np.array(
        [points[list(group)].mean(axis=0) for group in history.table.members.values()]
    )
    return space_filling_order(centres, history.seed, len(centres))
