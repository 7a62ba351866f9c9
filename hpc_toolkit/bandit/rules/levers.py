"""Groups of arms as the levers of a classic bandit: pulling a lever proposes its next arm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.rules.initial import space_filling_order

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History


@dataclass(slots=True)
class Lever:
    """One group of arms."""

    free: list[int]
    """Arms that may still be proposed, in the seed's order."""

    pulls: int
    """Arms told, failed or pending."""

    total: float
    """Sum of the rescaled rewards."""

    rewards: int
    """The number of arms with a reward."""

    @property
    def mean(self) -> float:
        """Mean reward, rescaled; 0 while there is none."""
        return self.total / self.rewards if self.rewards else 0.0


def levers_of(
    history: History, rescale: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> list[Lever]:
    """Return one lever per group, in table order; ``rescale`` is applied to all rewards at once."""
    stream = [history.seed, Stream.WITHIN_GROUPS]
    order = np.random.default_rng(stream).permutation(len(history.table.arms))
    place = np.argsort(order)
    rescaled = rescale(history.rewards).tolist() if history.scored else []
    reward_of = dict(zip(history.scored, rescaled, strict=True))
    levers = []
    for members in history.table.members.values():
        rewards = [reward_of[i] for i in members if i in reward_of]
        free = [i for i in members if i not in history.taken]
        levers.append(
            Lever(
                free=sorted(free, key=lambda i: int(place[i])),
                pulls=len(members) - len(free),
                total=math.fsum(rewards),
                rewards=len(rewards),
            )
        )
    return levers


def unpulled(history: History, levers: list[Lever]) -> list[int]:
    """Return the levers without a pull, in space-filling order of their groups' mean features."""
    points = history.table.standardised.values
    centres = np.array(
        [points[list(group)].mean(axis=0) for group in history.table.members.values()]
    )
    order = space_filling_order(centres, history.seed, len(centres))
    return [lever for lever in order if not levers[lever].pulls]


def to_unit_interval(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rescale the lowest reward to 0 and the highest to 1; all to 0 if they are equal."""
    low, high = rewards.min(), rewards.max()
    return np.asarray((rewards - low) / (high - low) if high > low else np.zeros(len(rewards)))
