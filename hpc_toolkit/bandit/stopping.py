"""When a search has cost enough, or cannot find much more."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.odds import win_odds
from hpc_toolkit.bandit.options import check_number, checked_count
from hpc_toolkit.bandit.spending import seconds_spent
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.bandit.history import Finalists, History
    from hpc_toolkit.bandit.policy import Policy, Proposal
    from hpc_toolkit.bandit.pulls import Pull


@dataclass(frozen=True, slots=True)
class StopRules:
    """Budgets and the end of a search; None: no such rule. Raises ConfigError for other values.

    What is pending counts as spent, so that the asks of a batch stay within a budget too. A pull
    during which a budget is passed is finished.
    """

    pulls: int | None = None
    """Different arms that were asked for, on whichever tasks; those that failed count as well."""

    evaluations: int | None = None
    """Evaluations of an arm on a task. Only with the tasks of the bandit known: before an arm is
    told, nobody can say how many tasks it stands for."""

    gpu_s: float | None = None
    """Seconds of workers: durations told, and those expected of what is pending."""

    wall_s: float | None = None
    """Seconds since the search began, as told to ``Policy.stop``."""

    win_probability: float | None = None
    """Stop when no arm that is not decided beats the best one with a higher probability than this
    (see ``odds.win_odds``)."""

    def __post_init__(self) -> None:
        for name in ("pulls", "evaluations"):
            if (count := getattr(self, name)) is not None:
                count = checked_count("stop", name, count, low=0, hint="a whole number, 0 or more")
                object.__setattr__(self, name, count)
        for name in ("gpu_s", "wall_s"):
            if (seconds := getattr(self, name)) is not None:
                check_number("stop", name, seconds, low=0, hint="seconds, 0 or more")
        if self.win_probability is not None:
            check_number(
                "stop", "win_probability", self.win_probability, low=0.0, high=1.0,
                hint="a probability, 0 to 1; 0.05 is usual",
            )  # fmt: skip

    def reason(
        self, history: History, *, judged: Finalists | None = None, wall_s: float = 0.0
    ) -> str | None:
        """Which rule holds now, in words with its numbers; None: none does.

        ``judged`` are the arms that the search's rule still has in the running, if it says so.
        """
        if self.pulls is not None:
            asked = _arms_asked(history)
            if asked >= self.pulls:
                return f"asked for {asked} arms, the budget is {self.pulls}"
        if self.evaluations is not None:
            evaluations = int(history.asked.sum())
            if evaluations >= self.evaluations:
                return f"asked for {evaluations} evaluations, the budget is {self.evaluations}"
        if self.gpu_s is not None:
            spent = seconds_spent(history)
            if spent >= self.gpu_s:
                return f"{spent:.4g} GPU seconds asked for, the budget is {self.gpu_s:.4g}"
        if self.wall_s is not None and wall_s >= self.wall_s:
            return f"{wall_s:.4g} seconds have passed, the budget is {self.wall_s:.4g}"
        if self.win_probability is not None:
            highest = float(np.max(win_odds(history, judged), initial=0.0))
            if highest <= self.win_probability:
                return (
                    f"no other arm is the best with a probability above {highest:.2g}, "
                    f"{self.win_probability:.2g} is asked for"
                )
        return None


def ask_within(policy: Policy, n: int, pending: Sequence[str | Pull] = ()) -> list[Proposal]:
    """At most ``n`` pulls, as many as the policy's stop rules let be asked for one by one."""
    asked = policy.ask(n, pending)
    pulls = [proposal.pull for proposal in asked]

    def stops_before(place: int) -> bool:
        return policy.stop([*pending, *pulls[:place]]) is not None

    # What is pending can only add to what was spent, so the first that is too much is looked for.
    return asked[: bisect_left(range(len(asked)), True, key=stops_before)]


def check_stop(stop: StopRules | None, *, tasks_known: bool) -> None:
    """Refuse rules that cannot be kept."""
    if stop is not None and stop.evaluations is not None and not tasks_known:
        message = "a budget in evaluations needs the tasks of the bandit"
        raise ConfigError(message, hint="give make_policy the task set, or a budget in pulls")


def _arms_asked(history: History) -> int:
    if history.asked.size:
        return int(history.asked.any(axis=1).sum())
    return len(history.taken)
