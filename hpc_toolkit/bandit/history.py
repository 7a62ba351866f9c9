"""What a rule may look at when it picks arms, and the shape of a rule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.policy import Proposal

TIE_DECIMALS = 12
"""Values that agree to this many decimals are a tie."""


@dataclass(frozen=True, eq=False)
class History:
    """Everything told and pending, in canonical form: sorted by arm index, so that no sum and no
    decision depends on the order in which results arrived.
    """

    table: ArmTable
    """All arms."""

    seed: int
    """The only source of randomness: ``default_rng([seed, ...])``."""

    scored: tuple[int, ...]
    """Ascending indices of the arms that have a reward."""

    rewards: NDArray[np.float64]
    """Shape (len(scored),): their rewards."""

    failed: tuple[int, ...]
    """Ascending indices of the arms that were told and have no reward."""

    pending: tuple[int, ...]
    """Ascending indices of the arms that are being evaluated."""

    @cached_property
    def taken(self) -> frozenset[int]:
        """Indices of all arms that may not be proposed."""
        return frozenset((*self.scored, *self.failed, *self.pending))


class Rule(Protocol):
    """A way to pick arms. A frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name that ``make_policy`` knows it by."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def choose(self, history: History, n: int) -> list[Proposal]:
        """At most ``n`` different arms, none of them taken. A pure function."""


def first_best(values: NDArray[np.float64] | Sequence[float]) -> int:
    """The lowest position of the highest value; values that agree to 12 decimals are equal.

    Without the rounding, the last bit of a sum would decide between arms that are symmetric.
    """
    return int(np.argmax(np.round(values, TIE_DECIMALS)))
