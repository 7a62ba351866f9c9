"""The told results of all arms, task by task, as arrays that grow with every tell."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.bandit.history import TaskResults
from hpc_toolkit.bandit.policy import Observation
from hpc_toolkit.bandit.pulls import Pull, TaskSet
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


class ResultArrays:
    """The scores of all arms on a set of tasks.

    Without a given task set, ``tasks`` are the tasks told so far, sorted by name, so that their
    order does not depend on the order of the tells.
    """

    def __init__(self, n_arms: int, tasks: TaskSet | None) -> None:
        self._open = tasks is None
        self.tasks = TaskSet(()) if tasks is None else tasks
        shape = (n_arms, len(self.tasks.names))
        self._scores, self._stderrs, self._seconds = (np.full(shape, math.nan) for _ in range(3))
        self._told = np.zeros(shape, np.bool_)

    def take(self, arm: int, observation: Observation) -> None:
        """Add one observation, whose tasks :func:`check_tasks` accepted."""
        if self._open:
            self._widen({*observation.scores, *observation.failed})
        for array, numbers in (
            (self._scores, observation.scores),
            (self._stderrs, observation.stderrs),
            (self._seconds, observation.seconds),
        ):
            for task, number in numbers.items():
                if task in observation.scores or task in observation.failed:
                    array[arm, self.tasks.index(task)] = number
        for task in (*observation.scores, *observation.failed):
            self._told[arm, self.tasks.index(task)] = True

    def results(self, pending: Iterable[tuple[int, Pull]] = ()) -> TaskResults:
        """Return the results, with these pulls of arms marked as asked for.

        Raises ConfigError for a pull of a task that is not in the set. Without a given task set, a
        pull covers all tasks of its arm.
        """
        asked = self._told.copy()
        for arm, pull in pending:
            if self._open or not pull.tasks:
                asked[arm] = True
            else:
                asked[arm, [self.tasks.index(task) for task in pull.tasks]] = True
        return TaskResults(
            tasks=self.tasks,
            scores=_read_only(self._scores),
            stderrs=_read_only(self._stderrs),
            seconds=_read_only(self._seconds),
            told=_read_only(self._told),
            asked=_read_only(asked),
        )

    def _widen(self, names: set[str]) -> None:
        new = names.difference(self.tasks.names)
        if not new:
            return
        tasks = TaskSet(tuple(sorted({*self.tasks.names, *new})))
        places = [tasks.index(name) for name in self.tasks.names]
        wide = ResultArrays(len(self._told), tasks)
        for name in ("_scores", "_stderrs", "_seconds", "_told"):
            array = getattr(wide, name)
            array[:, places] = getattr(self, name)
            setattr(self, name, array)
        self.tasks = tasks


def merged(known: Observation, more: Observation) -> Observation:
    """Merge two observations of one arm.

    Raises ConfigError if they disagree on a task.
    """
    for task in {*known.scores, *known.failed} & {*more.scores, *more.failed}:
        if _told_of(known, task) != _told_of(more, task):
            message = f"arm {more.arm!r} was told before with another result of task {task!r}"
            hint = "what a policy was told stays; tell a task of an arm once"
            raise ConfigError(message, hint=hint)
    return Observation(
        arm=known.arm,
        scores={**known.scores, **more.scores},
        stderrs={**known.stderrs, **more.stderrs},
        seconds={**known.seconds, **more.seconds},
        failed=(*known.failed, *more.failed),
    )


def check_tasks(observation: Observation, tasks: TaskSet) -> None:
    """Raise ConfigError for an observation of a task that is not in the set."""
    for task in (*observation.scores, *observation.failed, *observation.seconds):
        tasks.index(task)


def _told_of(observation: Observation, task: str) -> tuple[float | None, ...]:
    return (
        observation.scores.get(task),
        observation.stderrs.get(task),
        observation.seconds.get(task),
    )


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
