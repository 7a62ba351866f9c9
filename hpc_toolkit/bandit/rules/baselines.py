"""The baseline that a search must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rule import Rule

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rule import History


@dataclass(frozen=True, slots=True)
class RandomOrder(Rule):
    """All arms in a random order, which depends only on the seed."""

    name: ClassVar[str] = "random"

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = np.random.default_rng([history.seed]).permutation(len(history.table.arms))
        free = [int(index) for index in order if index not in history.taken]
        return [Proposal(history.table.ids[i], None, "random order") for i in free[:n]]
