"""From the scores of several tasks to the one number that a policy maximises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.bandit.policy import Observation


@dataclass(frozen=True, slots=True)
class Reward:
    """One arm's reward."""

    mean: float
    """Mean of the scores of the tasks that have one."""

    stderr: float | None
    """Standard error of ``mean``, the tasks' errors taken as independent; None if unknown."""


def mean_reward(observation: Observation) -> Reward | None:
    """The mean over tasks, or None when more than half of the arm's tasks failed.

    A task that reports no standard error counts with the root mean square of those that do.
    The mean does not depend on the order of the tasks. It is over the tasks that there are: where
    some failed it is not adjusted for how hard those are.
    """
    count = len(observation.scores)
    if count == 0 or count < len(observation.failed):
        return None
    mean = math.fsum(observation.scores.values()) / count
    errors = observation.stderrs.values()
    if not errors:
        return Reward(mean, None)
    typical_square = math.fsum(error * error for error in errors) / len(errors)
    return Reward(mean, math.sqrt(typical_square / count))
