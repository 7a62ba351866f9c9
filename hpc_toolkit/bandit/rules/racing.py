"""Racing: all arms on one task after the other, and those that cannot win drop out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpc_toolkit.bandit.history import TIE_DECIMALS, Finalists, first_best
from hpc_toolkit.bandit.options import check_count, check_number
from hpc_toolkit.bandit.rules.rungs import Rung, pilot_proposals, proposals, task_order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History
    from hpc_toolkit.bandit.policy import Proposal


@dataclass(frozen=True, slots=True)
class Racing:
    """The cheapest tasks first; after each, arms that fall too far behind the leader drop out.

    When all arms that are left were told on k of K tasks, with k at least ``first``, arm a drops
    out if ``mean(leader - a) > c * sd(leader - a) / sqrt(k) * sqrt(1 - k / K)``: mean and standard
    deviation (of k - 1 degrees of freedom) of the paired differences over the k tasks, the last
    factor because the K tasks are all that there will be (Maron and Moore 1994, "Hoeffding races",
    with a paired bound as in Birattari et al. 2002, and the finite population correction of survey
    sampling). The race ends with one arm, or after all tasks with the exact mean.

    The tasks are no random sample, and an arm is looked at after every task, so ``c`` is no
    quantile of a known error: larger is safer and dearer. A failed task of either of two arms
    leaves their comparison; an arm of which more tasks failed than gave a score drops out. It
    needs the tasks of the bandit, and compares by the mean over them alone.
    """

    name: ClassVar[str] = "racing"

    c: float = 2.5
    """Standard errors behind the leader at which an arm drops out."""

    first: int = 3
    """Tasks before any arm drops out."""

    block: int = 1
    """Tasks between one look and the next."""

    def __post_init__(self) -> None:
        check_number(self.name, "c", self.c, low=0, hint="a number, 0 or more; 2.5 is usual")
        hint = "a whole number, 2 or more; 3 is usual"
        check_count(self.name, "first", self.first, low=2, hint=hint)
        hint = "a whole number, 1 or more; 1 is usual"
        check_count(self.name, "block", self.block, low=1, hint=hint)

    def choose(self, history: History, n: int) -> list[Proposal]:
        order = task_order(history)
        if order.pilot is not None:
            return pilot_proposals(history, order.pilot, n)
        rung = self._rung(history, order.tasks)
        if rung.until is None:
            return []
        reason = f"{len(rung.arms)} arms left after {rung.done} of {len(order.tasks)} tasks"
        return proposals(history, rung.arms.tolist(), order.tasks[: rung.until], reason, n)

    def finalists(self, history: History) -> Finalists | None:
        order = task_order(history)
        if order.pilot is not None:
            return None
        rung = self._rung(history, order.tasks)
        if rung.done == 0 or not rung.arms.size:
            return None
        tasks = order.tasks[: rung.done]
        scores = history.scores[rung.arms][:, tasks]
        return Finalists(tuple(rung.arms.tolist()), tasks, int(rung.arms[leader(scores)]))

    def _rung(self, history: History, order: tuple[int, ...]) -> Rung:
        scores, told = history.scores[:, order], history.by_task.told[:, order]
        arms, done = np.arange(len(scores)), 0
        for until in self._looks(len(order)):
            if not told[arms, :until].all():
                return Rung(arms, done, until)
            done = until
            arms = arms[survivors(scores[arms, :until], len(order), self.c)]
            if len(arms) <= 1:
                break
        return Rung(arms, done, None)

    def _looks(self, tasks: int) -> Iterator[int]:
        """After how many tasks arms may drop out; the last time after all."""
        yield from range(self.first, tasks, self.block)
        yield tasks


def survivors(scores: NDArray[np.float64], population: int, c: float) -> NDArray[np.intp]:
    """The rows that are still in the race after k of ``population`` tasks.

    ``scores`` has shape (n_arms, k), k >= 1, NaN for a failed task. The leader is always among
    them, unless no arm has a score for half of the tasks.
    """
    tasks = scores.shape[1]
    usable = np.flatnonzero(2 * (~np.isnan(scores)).sum(axis=1) >= tasks)
    if not usable.size:
        return usable
    behind = scores[usable[leader(scores[usable])]] - scores[usable]
    counts = (~np.isnan(behind)).sum(axis=1)
    means = np.nansum(behind, axis=1) / np.maximum(counts, 1)
    squares = np.nansum((behind - means[:, None]) ** 2, axis=1)
    sd = np.sqrt(squares / np.maximum(counts - 1, 1))
    correction = np.sqrt(1.0 - tasks / population)
    bound = c * correction * sd / np.sqrt(np.maximum(counts, 1))
    # One common task says nothing of the spread of differences, unless there will be no other.
    unknown = (counts < 2) & (tasks < population)
    # Without the rounding, equal arms would part by what sums leave in the last bit.
    near = unknown | (np.round(means - bound, TIE_DECIMALS) <= 0.0)
    return np.asarray(usable[near], np.intp)


def leader(scores: NDArray[np.float64]) -> int:
    """The row of the highest mean; the first of equal ones.

    A missing score counts as the task's mean over the rows, so that nobody leads by having failed
    on the hard tasks.
    """
    known = ~np.isnan(scores)
    centre = np.nansum(scores, axis=0) / np.maximum(known.sum(axis=0), 1)
    return first_best(np.where(known, scores - centre, 0.0).mean(axis=1))
