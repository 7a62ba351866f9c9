"""What a policy requests and is told: pulls, tasks, observations, recommendations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_toolkit.errors import ConfigError, near_miss

T = TypeVar("T")

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.intp]

LARGEST_NUMBER = 1e100
"""Squares of larger numbers overflow."""


class Pull(NamedTuple):
    """One arm and the tasks to evaluate it on; pass it to ``ask`` as pending until it is told."""

    arm: str
    tasks: tuple[str, ...] = ()
    """Names of tasks; empty means every task that was not requested for the arm before."""


@dataclass(frozen=True)
class TaskSet:
    """The evaluation tasks of a bandit. A task's index is its position in ``names``.

    Raises ConfigError for a name that is empty or repeated, for durations that are not as many as
    the names, and for a duration that is negative or infinite.
    """

    names: tuple[str, ...]
    """The order is part of the set: it breaks ties."""
    seconds: tuple[float, ...] = ()
    """Expected seconds of each task on one worker; NaN, or an empty tuple: not known."""

    def __post_init__(self) -> None:
        refuse_repeats("task", self.names)
        if self.seconds and len(self.seconds) != len(self.names):
            message = f"{len(self.seconds)} seconds for {len(self.names)} tasks"
            raise ConfigError(message, hint=f"give one for each of: {', '.join(self.names)}")
        for name, seconds in zip(self.names, self.seconds, strict=bool(self.seconds)):
            if seconds < 0 or math.isinf(seconds):
                message = f"task {name!r}: an expected duration of {seconds} seconds"
                raise ConfigError(message, hint="use NaN for an unknown duration")

    @cached_property
    def expected(self) -> Floats:
        """Shape (n_tasks,): ``seconds``, NaN where not known."""
        return np.array(self.seconds or [math.nan] * len(self.names), dtype=np.float64)

    def index(self, task: str) -> int:
        """Return the index of a task. Raises ConfigError with the nearest known name."""
        return look_up("task", task, self._index_of)

    @cached_property
    def _index_of(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}


def look_up(what: str, name: str, known: Mapping[str, T]) -> T:
    """Return the value of a name. Raises ConfigError with the nearest known name."""
    try:
        return known[name]
    except KeyError:
        message = f"unknown {what} {name!r}"
        raise ConfigError(message, hint=near_miss(str(name), list(known))) from None


def refuse_repeats(what: str, words: Sequence[object]) -> None:
    """Raise ConfigError unless the words are different non-empty strings."""
    for word in words:
        if not isinstance(word, str) or not word:
            raise ConfigError(f"{what} {word!r} is not a non-empty string")
    for word, count in Counter(words).items():
        if count > 1:
            message = f"{what} {word!r} occurs {count} times"
            raise ConfigError(message, hint=f"every {what} must be unique")


@dataclass(frozen=True, slots=True)
class Observation:
    """Results of one arm: the scores of all or of some of its evaluation tasks.

    Raises ConfigError for a value that is not a finite number, for a standard error without its
    score, for a task that both scored and failed, and for an observation without any task.
    """

    arm: str
    scores: Mapping[str, float] = field(default_factory=dict)
    """Main score by task; higher is better."""
    stderrs: Mapping[str, float] = field(default_factory=dict)
    """Standard error of the score by task; tasks may be left out."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of the evaluation by task; tasks may be left out."""
    failed: tuple[str, ...] = ()
    """Tasks that gave no score and never will."""

    def __post_init__(self) -> None:
        for name in ("scores", "stderrs", "seconds"):
            numbers = _finite_numbers(f"arm {self.arm!r}: {name}", getattr(self, name))
            object.__setattr__(self, name, numbers)
        object.__setattr__(self, "failed", tuple(sorted(set(self.failed))))
        if not self.scores and not self.failed:
            message = f"arm {self.arm!r}: it has neither scores nor failed tasks"
            raise ConfigError(message, hint="list the failed tasks of an arm without scores")
        problems = [
            f"{name}[{task!r}] is negative"
            for name in ("stderrs", "seconds")
            for task, number in getattr(self, name).items()
            if number < 0
        ]
        stray = sorted(set(self.stderrs) - set(self.scores))
        problems += [f"task {task!r} has a standard error but no score" for task in stray]
        both = sorted(set(self.failed) & set(self.scores))
        problems += [f"task {task!r} has a score and is called failed" for task in both]
        if problems:
            raise ConfigError(f"arm {self.arm!r}: {problems[0]}")

    def numbers_of(self, task: str) -> tuple[float, ...]:
        """Return score, standard error and seconds of a task; NaN for what is missing."""
        # One NaN object, which is equal to itself in a comparison of tuples.
        given = (self.scores, self.stderrs, self.seconds)
        return tuple(numbers.get(task, math.nan) for numbers in given)

    def to_json(self) -> dict[str, Any]:
        """Return a value that ``json.dumps`` writes as strict JSON and ``from_json`` restores."""
        # Not by ``asdict``, which copies every number on its own: most of a coordinator's time.
        return {
            "arm": self.arm,
            "scores": {**self.scores},
            "stderrs": {**self.stderrs},
            "seconds": {**self.seconds},
            "failed": [*self.failed],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Observation:
        """Return the observation that ``to_json`` wrote. Raises ConfigError for any other value."""
        try:
            return cls(**{**value, "failed": tuple(value["failed"])})
        except (KeyError, TypeError) as error:
            message = f"not an observation: {type(error).__name__}: {error}"
            raise ConfigError(message, hint="expected a value of Observation.to_json()") from error


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best arm among those told, and the uncertainty of that choice."""

    arm: str
    mean: float
    """The arm's reward: the mean of its scores over ``tasks``."""
    stderr: float | None
    """Standard error of ``mean``; None when no task reported one."""
    ties: tuple[str, ...]
    """Other told arms, best first, whose difference from the best may be noise. Over the tasks that
    both have, the 95 % interval of the mean of the paired differences contains 0 (Student's t). On
    one task, the rewards differ by at most 2 combined standard errors, with an unknown error taken
    as 0. Arms that were never told are not considered."""
    failed: tuple[str, ...] = ()
    """Tasks missing from ``mean`` because they failed. The mean is then over fewer tasks than the
    means of other arms, so check a comparison with them."""
    tasks: tuple[str, ...] = ()
    """The tasks that ``mean`` covers and by which the arms were compared. Fewer than all if the
    policy needed no more to decide, or is not finished."""


def number(value: object) -> float | None:
    """Return a value as a number that an observation can hold; None if it is not one."""
    # Check for float first: isinstance with the abstract class Real is slow.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    # The comparison is false for NaN, so NaN is rejected as well.
    return found if abs(found) <= LARGEST_NUMBER else None


def _finite_numbers(where: str, given: Mapping[str, object]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for task in sorted(given):
        found = number(given[task])
        if found is None:
            message = f"{where}[{task!r}] is {given[task]!r}, not a number up to {LARGEST_NUMBER:g}"
            raise ConfigError(message, hint="report a task without a finite score as failed")
        numbers[task] = found
    return numbers
