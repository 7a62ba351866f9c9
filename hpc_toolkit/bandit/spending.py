"""What the evaluations of a search took, and what those that are pending will take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.durations import task_seconds

if TYPE_CHECKING:
    from hpc_toolkit.bandit.history import History


def seconds_spent(history: History) -> float:
    """Durations told, and those expected of what is pending (see ``durations.task_seconds``), in
    seconds of one worker."""
    seconds = history.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.asked & ~history.by_task.told).sum(axis=0)
    expected = pending * task_seconds(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])
