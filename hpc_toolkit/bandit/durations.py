"""How long evaluations are expected to take, from what was told of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.ridge import Ridge, design

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_toolkit.bandit.history import History

SHORTEST_S = 1e-3
"""In place of shorter durations, whose logarithm would be far from the others."""


def task_seconds(history: History) -> NDArray[np.float64]:
    """Shape (n_tasks,): seconds on one worker that each task takes an average arm.

    The mean of those told of it; else what the task set says; else the mean of all that are known;
    else 0.
    """
    expected = history.tasks.expected.copy()
    for task, column in enumerate(history.seconds.T):
        known = column[~np.isnan(column)]
        if known.size:
            expected[task] = known.mean()
    gaps = np.isnan(expected)
    expected[gaps] = expected[~gaps].mean() if not gaps.all() else 0.0
    return expected


def arm_seconds(history: History, points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shape (n_arms,): seconds on one worker for all tasks of an arm; 1 where nothing is known.

    A ridge regression of the logarithm on ``points``, shape (n_arms, n_columns), from the arms
    with a reward whose every told task has a duration.
    """
    results = history.by_task
    timed = [
        arm
        for arm in history.scored
        if results.told[arm].any() and not np.isnan(results.seconds[arm, results.told[arm]]).any()
    ]
    if not timed:
        return np.ones(len(points))
    totals = np.array([results.seconds[arm, results.told[arm]].sum() for arm in timed])
    logarithms = np.log(np.maximum(totals, SHORTEST_S))
    centre, spread = logarithms.mean(), logarithms.std() or 1.0
    terms = design(points, 1)
    ridge = Ridge(terms[timed], (logarithms - centre) / spread, 1.0)
    return np.asarray(np.exp(centre + spread * (terms @ ridge.theta)))


def slowness(seconds: NDArray[np.float64], expected: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shape (n_arms,): how many times as long as expected each arm took over some tasks.

    ``seconds`` has shape (n_arms, n_tasks), NaN for a duration that was not told, which counts as
    the one that ``expected``, shape (n_tasks,), has for the task. 1 where no time is expected.
    """
    total = float(expected.sum())
    if total <= 0.0:
        return np.ones(len(seconds))
    return np.asarray(np.where(np.isnan(seconds), expected, seconds).sum(axis=1) / total)


class TaskOrder(NamedTuple):
    """The tasks from the cheapest to the dearest, or the arm to ask for that."""

    tasks: tuple[int, ...]
    """Indices of all tasks; ties go to the lower index, tasks of unknown duration come last."""

    seconds: NDArray[np.float64]
    """Shape (n_tasks,): expected duration of each of ``tasks``, in that order; where nothing is
    known of any, 1 for each."""

    pilot: int | None = None
    """The arm that must be told on all tasks before an order is known; None: it is known."""

    timed_by: int | None = None
    """The arm whose durations ``seconds`` are; None: the bandit was given them, or nobody was."""


def task_order(history: History) -> TaskOrder:
    """By the expected durations, where the bandit was given one of every task; else by those of
    one arm that the seed draws, the next one if that came through no task.
    """
    expected = history.tasks.expected
    if not np.isnan(expected).any():
        return _ascending(expected)
    order = np.random.default_rng([history.seed, Stream.PILOT])
    for arm in order.permutation(len(history.table.arms)).tolist():
        if not history.by_task.told[arm].all():
            return TaskOrder((), np.empty(0), pilot=arm)
        if not np.isnan(history.seconds[arm]).all():
            return _ascending(history.seconds[arm])._replace(timed_by=arm)
        if not np.isnan(history.scores[arm]).all():
            # Nobody tells durations: another arm would not either.
            break
    return _ascending(np.full(len(expected), np.nan))


def _ascending(seconds: NDArray[np.float64]) -> TaskOrder:
    known = np.where(np.isnan(seconds), np.inf, seconds)
    order = np.argsort(known, kind="stable")
    # A task that failed says nothing of how long it takes: as long as the longest.
    longest = float(np.nanmax(seconds)) if not np.isnan(seconds).all() else 0.0
    costs = np.where(np.isnan(seconds), longest, seconds)[order]
    if not costs.any():
        costs = np.ones(len(costs))
    return TaskOrder(tuple(order.tolist()), costs)
