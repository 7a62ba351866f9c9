"""Shared parts of racing and halving, which evaluate all remaining arms on the same tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.paired import silent_tasks
from hpc_toolkit.bandit.policy import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History


class Rung:
    """The state of a contest of arms, computed from the beginning for every ask."""

    def __init__(self, history: History, order: Sequence[int]) -> None:
        self._history = history
        self._order = tuple(order)
        self.arms: NDArray[np.intp] = np.arange(len(history.table.arms))
        """Ascending indices of the remaining arms."""
        self.done = 0
        """All remaining arms were told on the first ``done`` tasks of the order."""
        self.counted: tuple[int, ...] = ()
        """The tasks among these by which arms are compared."""
        self.dropped: tuple[int, ...] = ()
        """The other tasks, which gave no scores to compare (see ``paired.silent_tasks``)."""
        self.until: int | None = None
        """The arms must be told on the first ``until`` tasks next; None: the contest is over."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """Scores of the remaining arms on the counted tasks, shape (len(arms), len(counted))."""
        return self._history.scores[self.arms][:, self.counted]

    def reach(self, until: int) -> bool:
        """Advance to the first ``until`` tasks; if some are not told, request them, return False.

        The remaining arms at that point decide once and for all which of the new tasks count.
        """
        new = self._order[self.done : until]
        if not self._history.by_task.told[self.arms][:, new].all():
            self.until = until
            return False
        silent = silent_tasks(self._history.scores[self.arms][:, new]).tolist()
        self.counted += tuple(task for task, lost in zip(new, silent, strict=True) if not lost)
        self.done = until
        self.dropped += tuple(task for task, lost in zip(new, silent, strict=True) if lost)
        return True

    def proposals(self, reason: str, n: int) -> list[Proposal]:
        """Return the first ``n`` requested pulls; none when the contest is over."""
        if self.until is None:
            return []
        if self.dropped:
            names = ", ".join(self._history.tasks.names[task] for task in sorted(self.dropped))
            reason += f"; left out, without scores to compare: {names}"
        tasks = self._order[: self.until]
        return proposals(self._history, self.arms.tolist(), tasks, reason, n)


def proposals(
    history: History, arms: Sequence[int], tasks: Sequence[int], reason: str, n: int
) -> list[Proposal]:
    """Propose the first ``n`` arms that lack some of these tasks, each with its missing tasks.
    The list is empty if all are told or pending.
    """
    found: list[Proposal] = []
    names = history.tasks.names
    for arm in arms:
        if len(found) >= n:
            break
        left = tuple(names[task] for task in tasks if not history.asked[arm, task])
        if left:
            found.append(Proposal(history.table.ids[arm], None, reason, left))
    return found


def pilot_proposals(history: History, pilot: int, n: int) -> list[Proposal]:
    """Propose the pilot on its tasks not asked for yet; nothing while it is being evaluated."""
    reason = "tells how long each task takes"
    return proposals(history, [pilot], range(len(history.tasks.names)), reason, n)
