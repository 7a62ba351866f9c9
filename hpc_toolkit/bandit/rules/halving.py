"""Successive halving over nested sets of tasks, the cheapest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.durations import slowness, task_order
from hpc_toolkit.bandit.history import TIE_DECIMALS, Finalists
from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.reward import rewards_of
from hpc_toolkit.bandit.rules.rungs import Rung, pilot_proposals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.durations import TaskOrder
    from hpc_toolkit.bandit.history import History
    from hpc_toolkit.bandit.policy import Proposal


@dataclass(frozen=True, slots=True)
class Halving:
    """Evaluate all arms on a few cheap tasks, then the best 1/``eta`` on more tasks, and so on.

    This is sequential halving (Karnin, Koren and Somekh 2013, "Almost optimal exploration in
    multi-armed bandits") in which each rung adds tasks. Every rung gets the same part of the budget
    and adds as many tasks, cheapest first, as that pays for; the rest goes to the next rung.

    The budget is ``share`` of the expected duration of all arms on all tasks. If a pilot arm gave
    the expected durations, its evaluations are part of the budget, and the arms' mean slowness
    relative to the pilot on the first rung rescales the budget. Finished evaluations count with
    their told durations; an arm's coming ones are scaled by its slowness so far. No rung is
    expected to exceed its part of the budget, except by the first task, but it may exceed it.

    Arms of a rung are compared by their reward over its tasks; ties go to the lower index. An arm
    with more failed tasks than scores drops out. A task that cannot compare the arms (see
    ``paired.silent_tasks``) does not count, and the rung adds as many others as the budget pays
    for. The rule needs the bandit's task set.
    """

    name: ClassVar[str] = "halving"

    eta: float = 2.0
    """One arm in this many goes on to the next rung."""

    share: float = 0.05
    """The budget, as a share of the duration of all arms on all tasks. The first rung takes one
    task even if the budget is too small for it; the last rung takes at most all tasks."""

    def __post_init__(self) -> None:
        check_number(self.name, "eta", self.eta, low=1.1, hint="a number above 1.1; 2 is usual")
        hint = "a share of the cost of all arms on all tasks, above 0, at most 1"
        check_number(self.name, "share", self.share, low=1e-6, high=1.0, hint=hint)

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = task_order(history)
        if order.pilot is not None:
            return pilot_proposals(history, order.pilot, n)
        rung = self._rung(history, order)
        return rung.proposals(f"rung of {len(rung.arms)} arms on {rung.until} tasks", n)

    def finalists(self, history: History) -> Finalists | None:
        order = task_order(history)
        if order.pilot is not None:
            return None
        rung = self._rung(history, order)
        if not rung.counted or not rung.arms.size:
            return None
        return Finalists(tuple(rung.arms.tolist()), rung.counted, dropped=rung.dropped)

    def _rung(self, history: History, order: TaskOrder) -> Rung:
        """Return the open rung with its arms; if all rungs are done, the last one."""
        rung, purse = Rung(history, order.tasks), _Purse(history, order, self.share)
        sizes = self.sizes(len(rung.arms))
        for place, size in enumerate(sizes, start=1):
            rung.arms = self._best(history, rung, size)
            if not rung.arms.size:
                break
            while True:
                before, dropped = rung.done, len(rung.dropped)
                until = purse.affordable(rung, place / len(sizes))
                if until > before and not rung.reach(until):
                    return rung
                purse.pay(rung, before)
                # Tasks dropped for lack of scores compared nothing: add others if affordable.
                if rung.done == len(order.tasks) or (rung.counted and len(rung.dropped) == dropped):
                    break
        return rung

    def _best(self, history: History, rung: Rung, size: int) -> NDArray[np.intp]:
        """Return the ``size`` best arms over the tasks that count; all arms if none counts."""
        if not rung.counted:
            return rung.arms
        arms, tasks = rung.arms.tolist(), rung.counted
        rewards = rewards_of(history.by_task, arms, tasks=tasks, scalariser=history.scalariser)
        best = sorted(rewards, key=lambda arm: (-round(rewards[arm].mean, TIE_DECIMALS), arm))
        return np.array(sorted(best[:size]), dtype=np.intp)

    def sizes(self, arms: int) -> list[int]:
        """Return the number of arms of each rung; the last rung has at most ``eta``."""
        sizes = [arms]
        while sizes[-1] > self.eta:
            sizes.append(min(sizes[-1] - 1, math.ceil(sizes[-1] / self.eta)))
        return sizes


class _Purse:
    """The budget of the rungs and their spending, in expected and told seconds."""

    def __init__(self, history: History, order: TaskOrder, share: float) -> None:
        self._tasks, self._expected = order.tasks, order.seconds
        self._seconds = history.seconds[:, order.tasks]
        self._share = share
        self._everything = len(self._seconds) * float(order.seconds.sum())
        self._pilot = -1 if order.timed_by is None else order.timed_by
        self._corrected = self._pilot < 0
        self._prepaid, self._spent = 0.0, 0.0
        if self._pilot >= 0:
            self._prepaid = self._took(np.array([self._pilot]), 0, len(order.tasks))

    def affordable(self, rung: Rung, part: float) -> int:
        """Return how many tasks the arms can be told on for this part of the budget; at least one
        more than are done while no task counts.
        """
        left = part * (self._share * self._everything - self._prepaid) - self._spent
        pace = self._pace(rung)[rung.arms]
        each = max(float(pace[rung.arms != self._pilot].sum()), 1e-9)
        spent = np.concatenate([[0.0], np.cumsum(self._expected)])
        # Rounding in the sums must not cost a task.
        reach = float(spent[rung.done]) + left / each * (1.0 + 1e-9)
        tasks = int(np.searchsorted(spent, reach, side="right")) - 1
        return min(max(tasks, rung.done, 1 if rung.counted else rung.done + 1), len(self._expected))

    def pay(self, rung: Rung, before: int) -> None:
        """Charge for the tasks after the first ``before`` on which the arms were told."""
        payers = rung.arms[rung.arms != self._pilot]
        self._spent += self._took(payers, before, rung.done)
        if rung.counted and not self._corrected:
            # All arms were told on these tasks, which shows if the pilot is slower or faster.
            self._everything *= float(self._pace(rung).mean())
            self._corrected = True

    def _pace(self, rung: Rung) -> NDArray[np.float64]:
        """Return every arm's slowness on the counted tasks; tasks that fail can end at once."""
        counted = [place for place, task in enumerate(self._tasks) if task in rung.counted]
        return slowness(self._seconds[:, counted], self._expected[counted])

    def _took(self, arms: NDArray[np.intp], start: int, stop: int) -> float:
        seconds = self._seconds[arms, start:stop]
        return float(np.where(np.isnan(seconds), self._expected[start:stop], seconds).sum())
