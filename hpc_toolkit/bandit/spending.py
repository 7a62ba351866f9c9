"""What the evaluations of a search took, and what those that are pending will take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History


def seconds_spent(history: History) -> float:
    """Durations told, and those expected of what is pending, in seconds of one worker.

    A task that was told of other arms is expected to take their mean; else what the task set says;
    else the mean of all that are known; else nothing.
    """
    seconds = history.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.asked & ~history.by_task.told).sum(axis=0)
    expected = pending * _expected(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])


def _expected(history: History) -> NDArray[np.float64]:
    """Shape (n_tasks,): the duration of every task on an average arm."""
    expected = history.tasks.expected.copy()
    for task, column in enumerate(history.seconds.T):
        known = column[~np.isnan(column)]
        if known.size:
            expected[task] = known.mean()
    gaps = np.isnan(expected)
    expected[gaps] = expected[~gaps].mean() if not gaps.all() else 0.0
    return expected
