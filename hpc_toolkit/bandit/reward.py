"""From the scores of several tasks to the one number that a policy maximises."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.scalarise import SCALARISERS, weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.bandit.history import TaskResults


@dataclass(frozen=True, slots=True)
class Reward:
    """One arm's reward."""

    mean: float
    """What the scalariser made of the scores of the tasks that have one."""

    stderr: float | None
    """Standard error of ``mean``, the tasks' errors taken as independent; None if unknown."""


def rewards_of(
    results: TaskResults,
    arms: Sequence[int],
    *,
    tasks: Sequence[int] | None = None,
    scalariser: str = "mean",
) -> dict[int, Reward]:
    """The rewards of some arms over some tasks, all by default; an arm of which more tasks failed
    than gave a score has none.

    A task that reports no standard error counts with the root mean square of the arm's that do.
    A reward is over the tasks that there are: where some failed it is not adjusted for how hard
    those are.
    """
    columns = list(range(len(results.tasks.names)) if tasks is None else tasks)
    part = results.tasks.part(columns)
    where = np.ix_(list(arms), columns)
    scores, stderrs, told = results.scores[where], results.stderrs[where], results.told[where]
    known = ~np.isnan(scores)
    counts, failures = known.sum(axis=1), (told & ~known).sum(axis=1)
    usable = np.flatnonzero((counts > 0) & (counts >= failures)).tolist()
    scores, stderrs = scores[usable], stderrs[usable]
    means = SCALARISERS[scalariser](scores, part)
    slopes = weights(scalariser, scores, part)
    found = {}
    for row, index in enumerate(usable):
        stderr = None if slopes is None else _stderr(stderrs[row], slopes[row], known[index])
        found[int(arms[index])] = Reward(float(means[row]), stderr)
    return found


def _stderr(stderrs: np.ndarray, slopes: np.ndarray, known: np.ndarray) -> float | None:
    told = stderrs[known & ~np.isnan(stderrs)]
    if not told.size:
        return None
    typical = math.fsum(float(error) ** 2 for error in told) / told.size
    squares = np.where(np.isnan(stderrs), typical, stderrs**2)[known]
    return math.sqrt(math.fsum((slopes[known] ** 2 * squares).tolist()))
