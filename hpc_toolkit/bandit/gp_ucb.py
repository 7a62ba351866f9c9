"""Upper confidence bound of a Gaussian process over the arms' features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.gp import Posterior, fit
from hpc_toolkit.bandit.history import first_best
from hpc_toolkit.bandit.initial import space_filling_order
from hpc_toolkit.bandit.policy import Proposal
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


@dataclass(frozen=True, slots=True)
class GpUcb:
    """The arm whose mean plus ``beta`` standard deviations is highest (Srinivas et al. 2010).

    Every arm tells something about its neighbours in feature space, so far fewer pulls than arms
    are needed where the reward is smooth in the features. Pending arms, and those chosen earlier
    in the same ask, lower the uncertainty around them and nothing else (kriging believer).
    Arms without a reward tell nothing.
    """

    name: ClassVar[str] = "gp-ucb"

    beta: float = 2.0
    """Standard deviations added to the mean; 0 never explores."""

    initial: int = 5
    """Arms taken in space-filling order before the process decides."""

    def __post_init__(self) -> None:
        if not _is_number(self.beta) or not 0 <= self.beta < math.inf:
            message = f"gp-ucb: beta is {self.beta!r}"
            raise ConfigError(message, hint="a number, 0 or more; 2 is usual")
        if not _is_number(self.initial) or self.initial < 1 or self.initial % 1:
            message = f"gp-ucb: initial is {self.initial!r}"
            raise ConfigError(message, hint="a whole number, 1 or more; 5 is usual")

    def choose(self, history: History, n: int) -> list[Proposal]:
        wanted = min(n, len(history.table.arms) - len(history.taken))
        opening = self._opening(history, wanted)
        ids = history.table.ids
        proposals = [Proposal(ids[i], None, "space-filling initial arm") for i in opening]
        if len(opening) < wanted:
            proposals += self._climb(history, opening, wanted - len(opening))
        return proposals

    def _opening(self, history: History, n: int) -> list[int]:
        """The initial arms that are due; all ``n`` while there is no reward to learn from."""
        if history.scored:
            n = min(n, max(0, self.initial - len(history.scored) - len(history.pending)))
        if n == 0:
            return []
        points = history.table.standardised.values
        order = space_filling_order(points, history.seed, n + len(history.taken))
        return [index for index in order if index not in history.taken][:n]

    def _climb(self, history: History, opening: list[int], n: int) -> list[Proposal]:
        points = history.table.standardised.values
        centre = float(history.rewards.mean())
        spread = float(history.rewards.std())
        if spread <= 1e-12 * max(1.0, abs(centre)):
            # One reward, or equal ones: what is left are rounding errors.
            spread = 1.0
        x, y = points[list(history.scored)], (history.rewards - centre) / spread
        posterior = Posterior(x, y, points, fit(x, y))
        for index in sorted((*history.pending, *opening)):
            posterior.believe(index)
        free = np.ones(len(points), dtype=np.bool_)
        free[[*history.taken, *opening]] = False
        proposals = []
        for _ in range(n):
            bounds = np.where(free, posterior.mean + self.beta * posterior.sd, -np.inf)
            index = first_best(bounds)
            mean, sd = centre + spread * posterior.mean[index], spread * posterior.sd[index]
            reason = f"expects {mean:.4g} +- {sd:.2g}"
            proposals.append(
                Proposal(history.table.ids[index], float(mean + self.beta * sd), reason)
            )
            free[index] = False
            posterior.believe(index)
        return proposals


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
