"""Stop rules of a search: budgets, and a low probability of finding a better arm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpc_toolkit.bandit.arms import columns
from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats
from hpc_toolkit.bandit.regression import Posterior, fit
from hpc_toolkit.bandit.rewards import gaps
from hpc_toolkit.bandit.rule import Finalists, History, checked_number
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
    win_probability: float | None = None
    """Stop when no undecided arm beats the best arm with a probability above this value (see
    ``win_odds``)."""

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
            return f"requested {counted(arms, 'arm')}, the budget is {self.pulls}"
        if self.evaluations is not None and (count := int(asked.sum())) >= self.evaluations:
            return f"requested {counted(count, 'evaluation')}, the budget is {self.evaluations}"
        if self.gpu_s is not None and (spent := seconds_spent(history)) >= self.gpu_s:
            used, most = format_duration(spent), format_duration(self.gpu_s)
            return f"requested {used} of GPU time, the budget is {most}"
        if self.wall_s is not None and wall_s >= self.wall_s:
            passed, most = format_duration(wall_s), format_duration(self.wall_s)
            return f"{passed} have passed, the budget is {most}"
        if self.win_probability is not None:
            highest = float(np.max(win_odds(history, judged), initial=0.0))
            if highest <= self.win_probability:
                bound = f"{self.win_probability:.2g} is requested"
                return f"no other arm is the best with a probability above {highest:.2g}, {bound}"
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


def win_odds(history: History, judged: Finalists | None = None) -> Floats:
    """Return shape (n_arms,): the probability that an arm's reward exceeds the best told reward.

    Each probability is for one arm: even if none exceeds x, the probability that any arm wins may
    exceed x. It is 0 for decided arms: told on all tasks, failed, or no longer in the running.

    If the rule reports the arms in the running (``judged``), use their paired differences to the
    leader (see :func:`gaps`), taken as normal; 1 with fewer than two common tasks. Otherwise use
    a Gaussian process over the geometry, fitted to the rewards like the default ``gp-ucb``; 1 while
    no arm has a reward. Either model can be wrong.
    """
    if judged is not None:
        return _paired(history, judged)
    odds = np.ones(len(history.table.arms))
    odds[[*history.scored, *history.failed]] = 0.0
    open_arms = np.flatnonzero(odds)
    if not history.scored or not open_arms.size:
        return odds
    centre, spread = float(history.rewards.mean()), float(history.rewards.std())
    if spread <= 1e-12 * max(1.0, abs(centre)):
        return odds
    points = columns(history.table, "geometry")
    x, y = points[list(history.scored)], (history.rewards - centre) / spread
    posterior = Posterior(x, y, points[open_arms], fit(x, y))
    odds[open_arms] = _above(posterior.mean - y.max(), posterior.sd)
    return odds


def _paired(history: History, judged: Finalists) -> Floats:
    odds = np.zeros(len(history.table.arms))
    arms, done = list(judged.arms), len(judged.tasks)
    population = len(history.results.tasks.names) - len(judged.dropped)
    if len(arms) < 2 or done >= population:
        return odds
    scores = history.results.scores[np.ix_(arms, judged.tasks)]
    leader = None if judged.leader is None else arms.index(judged.leader)
    found = gaps(scores, population, leader)
    odds[arms] = np.where(np.isinf(found.errors), 1.0, _above(-found.means, found.errors))
    odds[arms[found.leader]] = 0.0
    return odds


def _above(means: Floats, sds: Floats) -> Floats:
    """Return the probability that normal variables are above 0: 0 or 1 without spread."""
    found = [
        0.5 * math.erfc(-mean / (sd * math.sqrt(2.0))) if sd > 0 else float(mean > 0)
        for mean, sd in zip(means.tolist(), sds.tolist(), strict=True)
    ]
    return np.array(found)
