"""Stop rules of a search: budgets, and a low probability of finding a better arm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.durations import seconds_spent
from hpc_toolkit.bandit.odds import win_odds
from hpc_toolkit.bandit.policy import LARGEST_NUMBER
from hpc_toolkit.bandit.rule import checked_number
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from hpc_toolkit.bandit.rule import Finalists, History


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end a search; None turns a rule off. Raises ConfigError for invalid values.

    Pending pulls count as spent, so that the asks of a batch stay within a budget too. A pull that
    exceeds a budget while it runs is still finished.
    """

    pulls: int | None = None
    """Different arms that were asked for, on any tasks; failed arms count as well."""
    evaluations: int | None = None
    """Evaluations of an arm on a task."""
    gpu_s: float | None = None
    """Worker seconds: told durations plus the expected durations of pending evaluations."""
    wall_s: float | None = None
    """Seconds since the search began, as passed to ``Policy.stop``."""
    win_probability: float | None = None
    """Stop when no undecided arm beats the best arm with a probability above this value (see
    ``odds.win_odds``)."""

    def __post_init__(self) -> None:
        for name, hint in (
            ("pulls", "a whole number, 0 or more"),
            ("evaluations", "a whole number, 0 or more"),
            ("gpu_s", "seconds, 0 or more"),
            ("wall_s", "seconds, 0 or more"),
            ("win_probability", "a probability, 0 to 1; 0.05 is usual"),
        ):
            if (value := getattr(self, name)) is not None:
                high = 1.0 if name == "win_probability" else LARGEST_NUMBER
                whole, where = name in ("pulls", "evaluations"), f"stop: {name}"
                value = checked_number(where, value, low=0, high=high, whole=whole, hint=hint)
                object.__setattr__(self, name, value)

    def reason(
        self, history: History, *, judged: Finalists | None = None, wall_s: float = 0.0
    ) -> str | None:
        """Describe the rule that holds now, with its numbers; None: no rule holds.

        ``judged`` are the arms that the policy's rule still has in the running, if it reports them.
        """
        asked = history.results.asked
        if self.pulls is not None and (arms := int(asked.any(axis=1).sum())) >= self.pulls:
            return f"asked for {arms} arms, the budget is {self.pulls}"
        if self.evaluations is not None and (count := int(asked.sum())) >= self.evaluations:
            return f"asked for {count} evaluations, the budget is {self.evaluations}"
        if self.gpu_s is not None and (spent := seconds_spent(history)) >= self.gpu_s:
            used, most = format_duration(spent), format_duration(self.gpu_s)
            return f"asked for {used} of GPU time, the budget is {most}"
        if self.wall_s is not None and wall_s >= self.wall_s:
            passed, most = format_duration(wall_s), format_duration(self.wall_s)
            return f"{passed} have passed, the budget is {most}"
        if self.win_probability is not None:
            highest = float(np.max(win_odds(history, judged), initial=0.0))
            if highest <= self.win_probability:
                bound = f"{self.win_probability:.2g} is asked for"
                return f"no other arm is the best with a probability above {highest:.2g}, {bound}"
        return None
