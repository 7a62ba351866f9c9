"""Racing: evaluate all arms task by task, and drop arms that are unlikely to win."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.durations import task_order
from hpc_toolkit.bandit.history import TIE_DECIMALS, Finalists
from hpc_toolkit.bandit.options import check_number, checked_count
from hpc_toolkit.bandit.paired import best_row, gaps
from hpc_toolkit.bandit.rules.rungs import Rung, pilot_proposals

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History
    from hpc_toolkit.bandit.policy import Proposal


@dataclass(frozen=True, slots=True)
class Racing:
    """Evaluate the cheapest tasks first; arms that fall too far behind the leader drop out.

    Once all remaining arms were told on k of K tasks, with k at least ``first``, arm a drops out
    if ``mean(leader - a) > c * sd(leader - a) / sqrt(k) * sqrt(1 - k / K)``. Mean and standard
    deviation (with k - 1 degrees of freedom) are of the paired differences over the k tasks. The
    last factor is the finite population correction of survey sampling, since there are only K
    tasks. See Maron and Moore 1994, "Hoeffding races", and Birattari et al. 2002 for a paired
    bound. The race ends with one arm, or after all tasks with the exact mean.

    The tasks are not a random sample, and arms are checked after every task, so ``c`` is not a
    quantile of a known error: larger is safer and more expensive. Two arms are not compared on a
    task that failed for either; an arm with more failed tasks than scores drops out. A task that
    cannot compare the arms (see ``paired.silent_tasks``) counts in neither k nor K, and the next
    cheapest task replaces it. The rule needs the bandit's task set, and compares arms only by
    their mean over the tasks.
    """

    name: ClassVar[str] = "racing"

    c: float = 2.5
    """Standard errors behind the leader at which an arm drops out."""

    first: int = 3
    """Number of tasks before any arm drops out."""

    block: int = 1
    """Number of tasks between one check and the next."""

    def __post_init__(self) -> None:
        check_number(self.name, "c", self.c, low=0, hint="a number, 0 or more; 2.5 is usual")
        hint = "a whole number, 2 or more; 3 is usual"
        first = checked_count(self.name, "first", self.first, low=2, hint=hint)
        object.__setattr__(self, "first", first)
        hint = "a whole number, 1 or more; 1 is usual"
        block = checked_count(self.name, "block", self.block, low=1, hint=hint)
        object.__setattr__(self, "block", block)

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = task_order(history)
        if order.pilot is not None:
            return pilot_proposals(history, order.pilot, n)
        rung = self._rung(history, order.tasks)
        reason = f"{len(rung.arms)} arms left after {rung.done} of {len(order.tasks)} tasks"
        return rung.proposals(reason, n)

    def finalists(self, history: History) -> Finalists | None:
        order = task_order(history)
        if order.pilot is not None:
            return None
        rung = self._rung(history, order.tasks)
        rung.arms = rung.arms[comparable(rung.scores)]
        if not rung.counted or not rung.arms.size:
            return None
        leader = int(rung.arms[best_row(rung.scores)])
        return Finalists(tuple(rung.arms.tolist()), rung.counted, leader, rung.dropped)

    def _rung(self, history: History, order: tuple[int, ...]) -> Rung:
        rung, look = Rung(history, order), self.first
        while len(rung.arms) > 1 or not rung.counted:
            missing = max(look - len(rung.counted), 1)
            if rung.done == len(order) or not rung.reach(min(rung.done + missing, len(order))):
                break
            if len(rung.counted) >= look or rung.done == len(order):
                if rung.counted:
                    left = survivors(rung.scores, len(order) - len(rung.dropped), self.c)
                    rung.arms = rung.arms[left]
                look = len(rung.counted) + self.block
        return rung


def survivors(scores: NDArray[np.float64], population: int, c: float) -> NDArray[np.intp]:
    """Return the rows that are still in the race after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), k >= 1, NaN for a failed task. The leader is always included,
    unless no arm has a score for half of the tasks.
    """
    usable = comparable(scores)
    if not usable.size:
        return usable
    found = gaps(scores[usable], population)
    unknown = np.isinf(found.errors)
    bounds = c * np.where(unknown, 0.0, found.errors)
    # Without the rounding, the last bit of a sum would separate equal arms.
    near = unknown | (np.round(found.means - bounds, TIE_DECIMALS) <= 0.0)
    return np.asarray(usable[near], np.intp)


def comparable(scores: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the rows with a score for at least half of the tasks."""
    return np.flatnonzero(2 * (~np.isnan(scores)).sum(axis=1) >= scores.shape[1])
