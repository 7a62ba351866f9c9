"""Turn the scores of several tasks into the one number that a policy maximises."""

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
    """The scalariser's value for the arm's scores."""

    stderr: float | None
    """Standard error of ``mean``, assuming that errors of tasks are independent; None: unknown."""


def rewards_of(
    results: TaskResults,
    arms: Sequence[int],
    *,
    tasks: Sequence[int] | None = None,
    scalariser: str = "mean",
) -> dict[int, Reward]:
    """Return the rewards of some arms over some tasks, by default all tasks.

    An arm with more failed tasks than scores has no reward. A task without a standard error counts
    with the root mean square of the arm's known ones. Failed tasks are left out; apart from the
    scalariser itself, nothing adjusts the reward for how hard they are.
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
