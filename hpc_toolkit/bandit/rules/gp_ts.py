"""Thompson sampling from a Gaussian process over the arms' features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.rules.gp_search import GpRule
from hpc_toolkit.bandit.rules.guided import first_best_of

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rules.gp_search import Ask


@dataclass(frozen=True, slots=True)
class GpTs(GpRule):
    """Propose the best arm of a reward surface drawn from the posterior, a new one per proposal.

    Surfaces are drawn over all arms without results, or over the 600 with the highest bounds.
    Pending arms do not change the posterior: draws differ by themselves (Kandasamy et al. 2018).
    """

    name: ClassVar[str] = "gp-ts"

    believes: ClassVar[bool] = False

    def _pick(self, ask: Ask) -> tuple[int, float]:
        # Surfaces include pending arms, so that they do not depend on which arms are pending.
        surface = np.full(len(ask.free), -np.inf)
        surface[ask.surfaces.arms] = ask.surfaces.draw(ask.generator(Stream.GP_SAMPLE))
        if not ask.free[ask.surfaces.arms].any():
            surface = ask.posterior.mean
        index = first_best_of(surface, ask.free)
        return index, ask.scale.to_reward(surface[index])
