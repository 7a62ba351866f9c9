"""What racing and halving share: cheap tasks first, all arms that are left on the same tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc_toolkit.bandit.policy import Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History

PILOT = 32
"""Names the random stream that draws the arm which tells how long the tasks take:
``default_rng([seed, PILOT])``."""


class TaskOrder(NamedTuple):
    """The tasks from the cheapest to the dearest, or the arm to ask for that."""

    tasks: tuple[int, ...]
    """Indices of all tasks; ties go to the lower index, tasks of unknown duration come last."""

    seconds: NDArray[np.float64]
    """Shape (n_tasks,): expected duration of each of ``tasks``, in that order; where nothing is
    known of any, 1 for each."""

    pilot: int | None = None
    """The arm that must be told on all tasks before an order is known; None: it is known."""


class Rung(NamedTuple):
    """How far a contest of arms has come."""

    arms: NDArray[np.intp]
    """Ascending indices of the arms that are left."""

    done: int
    """All of these arms were told on the first ``done`` tasks of the order."""

    until: int | None
    """The tasks, from the first, that they are to be told on next; None: the contest is over."""


def task_order(history: History) -> TaskOrder:
    """By the expected durations, where the bandit was given one of every task; else by those of
    one arm that the seed draws, the next one if that gave none at all.
    """
    expected = history.tasks.expected
    if not np.isnan(expected).any():
        return _ascending(expected)
    arms = np.random.default_rng([history.seed, PILOT]).permutation(len(history.table.arms))
    for arm in arms.tolist():
        if not history.by_task.told[arm].all():
            return TaskOrder((), np.empty(0), arm)
        if not np.isnan(history.seconds[arm]).all():
            return _ascending(history.seconds[arm])
    return _ascending(np.full(len(expected), np.nan))


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


def _ascending(seconds: NDArray[np.float64]) -> TaskOrder:
    known = np.where(np.isnan(seconds), np.inf, seconds)
    order = np.argsort(known, kind="stable")
    # A task that failed says nothing of how long it takes: as long as the longest.
    longest = float(np.nanmax(seconds)) if not np.isnan(seconds).all() else 0.0
    costs = np.where(np.isnan(seconds), longest, seconds)[order]
    if not costs.any():
        costs = np.ones(len(costs))
    return TaskOrder(tuple(order.tolist()), costs)
