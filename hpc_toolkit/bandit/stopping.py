"""Stop rules of a search: its budgets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpc_toolkit.bandit.policy import Floats
from hpc_toolkit.bandit.rule import History, checked_number
from hpc_toolkit.system.quantities import counted, format_duration


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end a search; None turns a rule off. Raises ConfigError for invalid values.

    Pending pulls count as spent, so that the asks of a batch stay within a budget too. A pull that
    exceeds a budget while it runs is still finished.
    """

    pulls: int | None = None
    """Different arms that were requested, on any tasks; failed arms count as well."""
    evaluations: int | None = None
    """Evaluations of an arm on a task."""
    gpu_s: float | None = None
    """Worker seconds: told durations plus the expected durations of pending evaluations."""
    wall_s: float | None = None
    """Seconds since the search began, as passed to ``Policy.stop``."""

    def __post_init__(self) -> None:
        for name, hint in (
            ("pulls", "a whole number, 0 or more"),
            ("evaluations", "a whole number, 0 or more"),
            ("gpu_s", "seconds, 0 or more"),
            ("wall_s", "seconds, 0 or more"),
        ):
            if (value := getattr(self, name)) is not None:
                whole, where = name in ("pulls", "evaluations"), f"stop: {name}"
                value = checked_number(where, value, low=0, whole=whole, hint=hint)
                object.__setattr__(self, name, value)

    def reason(self, history: History, *, wall_s: float = 0.0) -> str | None:
        """Describe the rule that holds now, with its numbers; None: no rule holds."""
        asked = history.results.asked
        if self.pulls is not None and (arms := int(asked.any(axis=1).sum())) >= self.pulls:
            return f"requested {counted(arms, 'arm')}, the budget is {self.pulls}"
        if self.evaluations is not None and (count := int(asked.sum())) >= self.evaluations:
            return f"requested {counted(count, 'evaluation')}, the budget is {self.evaluations}"
        if self.gpu_s is not None and (spent := seconds_spent(history)) >= self.gpu_s:
            used, most = format_duration(spent), format_duration(self.gpu_s)
            return f"requested {used} of GPU time, the budget is {most}"
        if self.wall_s is not None and wall_s >= self.wall_s:
            passed, most = format_duration(wall_s), format_duration(self.wall_s)
            return f"{passed} have passed, the budget is {most}"
        return None


def task_seconds(history: History) -> Floats:
    """Return shape (n_tasks,): seconds on one worker that each task takes for an average arm.

    This is the mean of the task's told durations; else the expected duration in the task set; else
    the mean over the tasks for which one of these is known; else 0.
    """
    expected = history.results.tasks.expected.copy()
    for task, column in enumerate(history.results.seconds.T):
        known = column[~np.isnan(column)]
        if known.size:
            expected[task] = known.mean()
    gaps = np.isnan(expected)
    expected[gaps] = expected[~gaps].mean() if not gaps.all() else 0.0
    return expected


def seconds_spent(history: History) -> float:
    """Return the told plus the expected durations of pending evaluations, on one worker."""
    seconds = history.results.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.results.asked & ~history.results.told).sum(axis=0)
    expected = pending * task_seconds(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])
