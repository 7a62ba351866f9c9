"""Baselines that a search must beat: rules that learn nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.bandit.rule import Rule
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.rule import History

DEPTH_NAMES = ("relative_depth", "layer")
"""Features that identify a group's last layer; the first that the table has is used."""

STEP_NAMES = ("log1p_step", "step")
"""Features that measure how far a checkpoint is trained; the first in the table is used."""


@dataclass(frozen=True, slots=True)
class RandomOrder(Rule):
    """All arms in a random order, which depends only on the seed."""

    name: ClassVar[str] = "random"

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = np.random.default_rng([history.seed]).permutation(len(history.table.arms))
        free = [int(index) for index in order if index not in history.taken]
        return [Proposal(history.table.ids[i], None, "random order") for i in free[:n]]


@dataclass(frozen=True, slots=True)
class LastLayer(Rule):
    """Propose the deepest arm of each group, the most trained first, and no other arms.

    Groups with the same step, or of a table without a step feature, keep the table's order.
    The table needs a depth feature; NaN counts as the lowest depth or step.
    """

    name: ClassVar[str] = "last-layer"

    def choose(self, history: History, n: int) -> list[Proposal]:
        free = [index for index in last_layers(history.table) if index not in history.taken]
        return [Proposal(history.table.ids[i], None, "last layer") for i in free[:n]]


def last_layers(table: ArmTable) -> list[int]:
    """Return the deepest arm of each group, the most trained group first.

    Raises ConfigError if the table has no depth feature.
    """
    depth = _column(table, DEPTH_NAMES)
    if depth is None:
        message = f"last-layer needs a feature named {' or '.join(map(repr, DEPTH_NAMES))}"
        raise ConfigError(message, hint=f"the table has: {', '.join(table.feature_names)}")
    depth = np.nan_to_num(depth, nan=-np.inf)
    last = [max(group, key=lambda i: (depth[i], -i)) for group in table.members.values()]
    step = _column(table, STEP_NAMES)
    if step is None:
        return last
    step = np.nan_to_num(step, nan=-np.inf)
    return sorted(last, key=lambda i: (-step[i], i))


def _column(table: ArmTable, names: tuple[str, ...]) -> np.ndarray | None:
    for name in names:
        if name in table.feature_names:
            return table.features[:, table.feature_names.index(name)]
    return None
