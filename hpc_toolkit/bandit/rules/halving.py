"""Successive halving over nested sets of tasks, the cheapest first."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.history import TIE_DECIMALS, Finalists
from hpc_toolkit.bandit.options import check_number
from hpc_toolkit.bandit.reward import rewards_of
from hpc_toolkit.bandit.rules.rungs import Rung, pilot_proposals, proposals, task_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History
    from hpc_toolkit.bandit.policy import Proposal
    from hpc_toolkit.bandit.rules.rungs import TaskOrder


@dataclass(frozen=True, slots=True)
class Halving:
    """All arms on a few cheap tasks, the best 1/``eta`` of them on more, until one is left.

    Sequential halving (Karnin, Koren and Somekh 2013, "Almost optimal exploration in multi-armed
    bandits") where a rung adds tasks: every rung may spend the same part of the budget, and takes
    as many more tasks, from the cheapest, as that pays for; what it leaves goes to the next rung.
    The budget is ``share`` of what all arms on all tasks would take by the expected durations.
    What was told counts as it was; tasks to come are expected to take the arms that are left as
    much longer than their expected durations as the tasks before did.
    Arms of a rung are compared by their reward over its tasks; ties go to the lower index. An arm
    of which more tasks failed than gave a score drops out. It needs the tasks of the bandit.
    """

    name: ClassVar[str] = "halving"

    eta: float = 2.0
    """One arm of so many goes on to the next rung."""

    share: float = 0.05
    """The budget, as a share of the duration of all arms on all tasks. The first rung takes a task
    even where that is too little for one, and the last rung takes all tasks at most."""

    def __post_init__(self) -> None:
        check_number(self.name, "eta", self.eta, low=1.1, hint="a number above 1.1; 2 is usual")
        hint = "a share of the cost of all arms on all tasks, above 0, at most 1"
        check_number(self.name, "share", self.share, low=1e-6, high=1.0, hint=hint)

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = task_order(history)
        if order.pilot is not None:
            return pilot_proposals(history, order.pilot, n)
        rung = self._rung(history, order)
        if rung.until is None:
            return []
        reason = f"rung of {len(rung.arms)} arms on {rung.until} tasks"
        return proposals(history, rung.arms.tolist(), order.tasks[: rung.until], reason, n)

    def finalists(self, history: History) -> Finalists | None:
        order = task_order(history)
        if order.pilot is not None:
            return None
        rung = self._rung(history, order)
        if rung.done == 0:
            return None
        return Finalists(tuple(rung.arms.tolist()), order.tasks[: rung.done])

    def _rung(self, history: History, order: TaskOrder) -> Rung:
        """The open rung, with the arms of it; when all are done, the last one's."""
        arms = np.arange(len(history.table.arms))
        sizes = self.sizes(len(arms))
        spent = np.concatenate([[0.0], np.cumsum(order.seconds)])
        each = self.share * len(arms) * float(spent[-1]) / len(sizes)
        told, seconds = history.by_task.told[:, order.tasks], history.seconds[:, order.tasks]
        durations = np.where(np.isnan(seconds), order.seconds, seconds)
        done, left, slowness = 0, 0.0, 1.0
        for size in sizes:
            arms, before = self._best(history, arms, order.tasks[:done], size), done
            if not arms.size:
                break
            if done:
                slowness = float(durations[arms, :done].sum()) / (len(arms) * spent[done])
            left += each
            done = _affordable(spent, done, left / (len(arms) * max(slowness, 1e-9)))
            if not told[arms, :done].all():
                return Rung(arms, before, done)
            left -= float(durations[arms, before:done].sum())
        return Rung(arms, done, None)

    def _best(
        self, history: History, arms: NDArray[np.intp], tasks: tuple[int, ...], size: int
    ) -> NDArray[np.intp]:
        """So many of the arms, the best over these tasks."""
        if not tasks:
            return arms
        rewards = rewards_of(
            history.by_task, arms.tolist(), tasks=tasks, scalariser=history.scalariser
        )
        best = sorted(rewards, key=lambda arm: (-round(rewards[arm].mean, TIE_DECIMALS), arm))
        return np.array(sorted(best[:size]), dtype=np.intp)

    def sizes(self, arms: int) -> list[int]:
        """How many arms the rungs take: the last one at most ``eta``."""
        sizes = [arms]
        while sizes[-1] > self.eta:
            sizes.append(min(sizes[-1] - 1, math.ceil(sizes[-1] / self.eta)))
        return sizes


def _affordable(spent: NDArray[np.float64], done: int, seconds: float) -> int:
    """How many tasks an arm can be told on, for so many expected seconds after the first ``done``;
    at least one. ``spent[k]`` is the expected duration of the first k."""
    # What rounding adds to a sum must not cost a task.
    reach = float(spent[done]) + seconds * (1.0 + 1e-9)
    return max(int(np.searchsorted(spent, reach, side="right")) - 1, done, 1)
