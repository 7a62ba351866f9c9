"""Durations of evaluations: what pulls have taken, and estimates of what others will take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpc_toolkit.bandit.rule import Stream

if TYPE_CHECKING:
    from hpc_toolkit.bandit.policy import Floats
    from hpc_toolkit.bandit.rule import History


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


def slowness(seconds: Floats, expected: Floats) -> Floats:
    """Return shape (n_arms,): each arm's total duration divided by the expected total.

    ``seconds`` has shape (n_arms, n_tasks). NaN is a duration that was not told; it counts as the
    task's entry in ``expected``, shape (n_tasks,). The result is 1 if the expected total is 0.
    """
    total = float(expected.sum())
    if total <= 0.0:
        return np.ones(len(seconds))
    return np.asarray(np.where(np.isnan(seconds), expected, seconds).sum(axis=1) / total)


class TaskOrder(NamedTuple):
    """The tasks from shortest to longest, or the arm to evaluate first to learn that order."""

    tasks: tuple[int, ...]
    """Indices of all tasks; ties go to the lower index, tasks of unknown duration come last."""
    seconds: Floats
    """Shape (n_tasks,): expected duration of each of ``tasks``, in that order; 1 for each if none
    is known."""
    pilot: int | None = None
    """The arm that must be told on all tasks before the order is known; None: it is known."""
    timed_by: int | None = None
    """The arm that took ``seconds``; None: they come from the task set, or are unknown."""


def task_order(history: History) -> TaskOrder:
    """Order the tasks by expected duration, if the task set has one for every task.

    Otherwise order them by the durations of a pilot arm. The seed draws the pilot; if it has
    neither a score nor a duration on any task, the next arm drawn takes its place.
    """
    expected = history.results.tasks.expected
    if not np.isnan(expected).any():
        return _ascending(expected)
    order = np.random.default_rng([history.seed, Stream.PILOT])
    for arm in order.permutation(len(history.table.arms)).tolist():
        if not history.results.told[arm].all():
            return TaskOrder((), np.empty(0), pilot=arm)
        if not np.isnan(history.results.seconds[arm]).all():
            return _ascending(history.results.seconds[arm])._replace(timed_by=arm)
        if not np.isnan(history.results.scores[arm]).all():
            # Scores came without durations; another pilot would not give any either.
            break
    return _ascending(np.full(len(expected), np.nan))


def _ascending(seconds: Floats) -> TaskOrder:
    known = np.where(np.isnan(seconds), np.inf, seconds)
    order = np.argsort(known, kind="stable")
    # The duration of a failed task is unknown; it counts as long as the longest.
    longest = float(np.nanmax(seconds)) if not np.isnan(seconds).all() else 0.0
    costs = np.where(np.isnan(seconds), longest, seconds)[order]
    if not costs.any():
        costs = np.ones(len(costs))
    return TaskOrder(tuple(order.tolist()), costs)


def seconds_spent(history: History) -> float:
    """Return the told plus the expected durations of pending evaluations, on one worker."""
    seconds = history.results.seconds
    told = seconds[~np.isnan(seconds)].tolist()
    pending = (history.results.asked & ~history.results.told).sum(axis=0)
    expected = pending * task_seconds(history) if pending.any() else np.empty(0)
    return math.fsum([*told, *expected.tolist()])
