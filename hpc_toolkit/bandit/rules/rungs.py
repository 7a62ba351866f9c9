"""What racing and halving share: cheap tasks first, all arms that are left on the same tasks."""

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
    """How far a contest of arms has come, worked out from the beginning for every ask."""

    def __init__(self, history: History, order: Sequence[int]) -> None:
        self._history = history
        self._order = tuple(order)
        self.arms: NDArray[np.intp] = np.arange(len(history.table.arms))
        """Ascending indices of the arms that are left."""
        self.done = 0
        """All of these arms were told on the first ``done`` tasks of the order."""
        self.counted: tuple[int, ...] = ()
        """Those of them by which arms are compared."""
        self.dropped: tuple[int, ...] = ()
        """The others: tasks that gave no scores to compare (see ``paired.silent_tasks``)."""
        self.until: int | None = None
        """The tasks, from the first, that the arms are to be told on next; None: it is over."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """Shape (n_arms left, n_tasks counted)."""
        return self._history.scores[self.arms][:, self.counted]

    def reach(self, until: int) -> bool:
        """Go to the first ``until`` tasks, or ask for them; False while some are not told.

        Which tasks count is decided once, by the arms that are left then.
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
        """The first ``n`` pulls of what is asked for; none when it is over."""
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
    """The first ``n`` of the arms that were not asked for all of these tasks, with the rest of
    them. None of them when all are told or pending."""
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
    """The pilot on all of its tasks that were not asked; none while it is being evaluated."""
    reason = "tells how long each task takes"
    return proposals(history, [pilot], range(len(history.tasks.names)), reason, n)
