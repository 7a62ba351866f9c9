"""The protocol of a policy: its pulls, observations and recommendation."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


LARGEST_NUMBER = 1e100
"""Squares of larger numbers overflow."""


class Pull(NamedTuple):
    """One arm and the tasks to evaluate it on."""

    arm: str
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
        message = f"{value!r} is not a pull"
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
        refuse_repeats("task", self.names)
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


def refuse_repeats(what: str, words: Sequence[object]) -> None:
    """Raise ConfigError unless the words are different non-empty strings."""
    for word in words:
        if not isinstance(word, str) or not word:
            message = f"{what} {word!r} is not a non-empty string"
            raise ConfigError(message)
    for word, count in Counter(words).items():
        if count > 1:
            message = f"{what} {word!r} occurs {count} times"
            raise ConfigError(message, hint=f"every {what} must be unique")


def _seconds(task: str, given: object) -> float:
    if given is None:
        return math.nan
    if isinstance(given, bool) or not isinstance(given, Real):
        message = f"task {task!r}: an expected duration of {given!r}"
        raise ConfigError(message, hint="a number of seconds, or NaN where it is not known")
    return float(given)


@dataclass(frozen=True, slots=True)
class Proposal:
    """One arm that a policy wants evaluated."""

    arm: str
    acquisition: float | None
    """The value that the policy maximised, in units of the reward; None if it maximised nothing."""
    reason: str
    """The reason for the choice, one line for users."""
    tasks: tuple[str, ...] = ()
    """The tasks to evaluate the arm on; empty means every task not asked for before."""

    @property
    def pull(self) -> Pull:
        """The arm and its tasks; pass this to ``ask`` as pending until it is told."""
        return Pull(self.arm, self.tasks)


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
        self._check_tasks()

    def _check_tasks(self) -> None:
        if not self.scores and not self.failed:
            message = f"arm {self.arm!r}: neither a score nor a failed task"
            raise ConfigError(message, hint="name the failed tasks of an arm without scores")
        for name in ("stderrs", "seconds"):
            negative = [task for task, number in getattr(self, name).items() if number < 0]
            if negative:
                message = f"arm {self.arm!r}: {name}[{negative[0]!r}] is negative"
                raise ConfigError(message)
        stray = sorted(set(self.stderrs) - set(self.scores))
        if stray:
            message = f"arm {self.arm!r}: task {stray[0]!r} has a standard error but no score"
            raise ConfigError(message)
        both = sorted(set(self.failed) & set(self.scores))
        if both:
            message = f"arm {self.arm!r}: task {both[0]!r} has a score and is called failed"
            raise ConfigError(message)

    def to_json(self) -> dict[str, Any]:
        """Return a value that ``json.dumps`` writes as strict JSON and ``from_json`` restores."""
        return {**asdict(self), "failed": list(self.failed)}

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
    """The id of the arm with the highest reward."""
    mean: float
    """The arm's reward: see ``scalariser``."""
    stderr: float | None
    """Standard error of ``mean``; None when no task reported one."""
    ties: tuple[str, ...]
    """Other told arms, best first, whose difference from the best may be noise: their reward
    differs by at most 2 combined standard errors, sqrt(stderr_best^2 + stderr_other^2), with an
    unknown error taken as 0. Arms that were never told are not considered."""
    failed: tuple[str, ...] = ()
    """Tasks missing from ``mean`` because they failed. The mean is then over fewer tasks than the
    means of other arms, so check a comparison with them."""
    scalariser: str = "mean over tasks"
    """How the scores of several tasks became one reward."""
    tasks: tuple[str, ...] = ()
    """The tasks that ``mean`` covers and by which the arms were compared. Fewer than all if the
    policy needed no more to decide, or is not finished."""
    dropped: tuple[str, ...] = ()
    """Tasks on which the arms were told but not compared, because no arm has a score, or only one
    of more than two. This is the fault of the task and not of an arm."""


class Policy(Protocol):
    """Decides which arms to evaluate next, without files, a clock or global random state.

    The same seed, arms, options, tells and pending arms give the same proposals in every process,
    whatever the order of the tells and however often ``ask`` was called before.
    """

    @property
    def name(self) -> str:
        """The name of the policy in ``make_policy``."""

    def ask(self, n: int, pending: Sequence[str | Pull] = ()) -> list[Proposal]:
        """Return at most ``n`` pulls.

        An empty list means that a pending pull must be told first, or, if none is pending, that
        the policy has finished.

        ``pending`` must name every pull that was asked for and not yet told; an arm's id alone
        means all of its tasks. ``ask`` keeps no record of its answers, so a lost ask can simply be
        repeated. No task of an arm is proposed that is told, pending, or earlier in the list.
        Asking for more arms gives a longer list with the same beginning. Stop rules do not change
        the answer.
        """

    def tell(self, observation: Observation) -> None:
        """Add an arm's results on some tasks. The results of several tells add up, in any order.
        Telling a task again is harmless if its result is equal, else an error.
        """

    def best(self) -> Recommendation | None:
        """Return the best arm told so far; None while no arm has a reward."""

    def stop(self, pending: Sequence[str | Pull] = (), *, wall_s: float = 0.0) -> str | None:
        """Return the reason to ask for nothing more, for users; None: no stop rule holds.

        ``wall_s`` is the duration of the search in seconds, which a policy cannot know.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next ``ask`` depends on except the arms; JSON keeps it unchanged."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the policy that wrote ``state``; ConfigError if its arms or options differ."""


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
            raise ConfigError(message, hint="a task without a finite score has failed")
        numbers[task] = found
    return numbers
