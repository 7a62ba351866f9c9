"""Time spent on the evaluations of a search, including the pending ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.durations import task_seconds

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


def seconds_spent(history: History) -> float:
    """Return the told durations plus the expected durations of pending evaluations (see
    ``durations.task_seconds``), in seconds of one worker.
    """
    seconds = history.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.asked & ~history.by_task.told).sum(axis=0)
    expected = pending * task_seconds(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])
