"""Pulls: requests to evaluate an arm on some or on all of the tasks of a bandit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class Pull(NamedTuple):
    """One arm and the tasks to evaluate it on."""

    arm: str
    """The arm's id."""

    tasks: tuple[str, ...] = ()
    """Names of tasks; empty means every task that the arm was not asked for before."""

    @classmethod
    def of(cls, value: object) -> Pull:
        """Convert an arm's id, or an arm and its tasks as a pull, a tuple or a JSON list.

        Raises ConfigError for any other value.
        """
        if isinstance(value, str):
            return cls(value)
        match value:
            case [str(arm), [*tasks]]:
                names = tuple(task for task in tasks if isinstance(task, str))
                if len(names) == len(tasks):
                    return cls(arm, names)
        message = f"{value!r} is no pull"
        raise ConfigError(message, hint="give an arm's id, or its id and a list of tasks")


@dataclass(frozen=True)
class TaskSet:
    """The evaluation tasks of a bandit. A task's index is its position in ``names``.

    Raises ConfigError for a name that is empty or repeated, for durations or kinds that are not as
    many as the names, and for a duration that is not a number, negative or infinite.
    """

    names: tuple[str, ...]
    """The order is part of the set: it breaks ties."""

    seconds: tuple[float, ...] = ()
    """Expected seconds of each task on one worker; NaN or None, or an empty tuple: not known."""

    kinds: tuple[str, ...] = ()
    """Kind of each task, for instance clustering; only the scalariser ``mean-kind`` needs it."""

    def __post_init__(self) -> None:
        given_names: tuple[object, ...] = self.names
        for word in given_names:
            if not isinstance(word, str) or not word:
                message = f"task {word!r} is not a non-empty string"
                raise ConfigError(message)
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            message = f"task {twice!r} occurs {self.names.count(twice)} times"
            raise ConfigError(message, hint="every task must be unique")
        for what in ("seconds", "kinds"):
            given = getattr(self, what)
            if given and len(given) != len(self.names):
                message = f"{len(given)} {what} for {len(self.names)} tasks"
                raise ConfigError(message, hint=f"give one for each of: {', '.join(self.names)}")
        object.__setattr__(self, "seconds", tuple(map(_seconds, self.names, self.seconds)))
        for name, number in zip(self.names, self.seconds, strict=bool(self.seconds)):
            if number < 0 or math.isinf(number):
                message = f"task {name!r}: an expected duration of {number} seconds"
                raise ConfigError(message, hint="use NaN for a duration that is not known")

    @cached_property
    def expected(self) -> NDArray[np.float64]:
        """Shape (n_tasks,): ``seconds``, NaN where not known."""
        return np.array(self.seconds or [math.nan] * len(self.names), dtype=np.float64)

    def index(self, task: str) -> int:
        """Return the index of a task. Raises ConfigError with the nearest known name."""
        try:
            return self._index_of[task]
        except KeyError:
            message = f"unknown task {task!r}"
            raise ConfigError(message, hint=near_miss(str(task), list(self.names))) from None

    def part(self, indices: Sequence[int]) -> TaskSet:
        """Return the tasks at ``indices``, in that order."""
        return TaskSet(
            names=tuple(self.names[index] for index in indices),
            seconds=tuple(self.seconds[index] for index in indices) if self.seconds else (),
            kinds=tuple(self.kinds[index] for index in indices) if self.kinds else (),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a value that ``json.dumps`` writes as strict JSON; equal only for equal sets."""
        seconds = [None if math.isnan(number) else number for number in self.seconds]
        return {"names": list(self.names), "seconds": seconds, "kinds": list(self.kinds)}

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def _seconds(task: str, given: object) -> float:
    if given is None:
        return math.nan
    if isinstance(given, bool) or not isinstance(given, Real):
        message = f"task {task!r}: an expected duration of {given!r}"
        raise ConfigError(message, hint="a number of seconds, or NaN where it is not known")
    return float(given)
