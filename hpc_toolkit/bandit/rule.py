"""What a rule sees and chooses: results, rewards of arms, options, and its random numbers."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, unique
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.policy import (
    LARGEST_NUMBER,
    Bools,
    Floats,
    Observation,
    Pull,
    TaskSet,
)
from hpc_toolkit.errors import ConfigError, describe, near_miss

TIE_DECIMALS = 12
"""Values that agree to this many decimals are a tie."""


@unique
class Stream(IntEnum):
    """The streams of random numbers of one seed; each purpose has its own.

    numpy pads a list of seeds with zeros, so ``[seed]``, ``[seed, 0]`` and ``[seed, 0, 0]`` are
    the same stream. Give a new stream a number above 32, and define it only in this class. Never
    change the number of a stream that recorded searches have drawn from. A draw within an ask also
    takes the number of arms that are told, pending or chosen: then one ask for several arms draws
    the same numbers as several asks for one arm, and a lost ask is repeated with the same draws.
    """

    FIRST_ARM = 0
    """The same stream as the bare seed, with which the policy ``random`` orders the arms."""
    GP_SAMPLE = 2
    MADE_TASKS = 8
    SURFACE = 10
    """The mean rewards of a synthetic score table."""
    PILOT = 32


def checked_number(
    where: str,
    value: object,
    *,
    low: float,
    whole: bool = False,
    hint: str,
) -> float:
    """Return a number from ``low`` on; if it must be whole, 5.0 as the integer 5.

    Raises ConfigError for any other value.
    """
    given = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    # The comparison is false for NaN, so NaN is rejected as well.
    if not low <= given <= LARGEST_NUMBER or (whole and given % 1):
        raise ConfigError(f"{where} is {value!r}", hint=hint)
    return int(given) if whole else given


def number_option(default: float, *, low: float = 0) -> Any:
    whole = isinstance(default, int)
    kind = "a whole number" if whole else "a number"
    hint = f"{kind}, {low:g} or more; {default:g} is usual"
    check = partial(checked_number, low=low, whole=whole, hint=hint)
    return field(default=default, metadata={"check": check})


def word_option(default: str, known: Sequence[str]) -> Any:

    def check(where: str, value: object) -> object:
        if value in known:
            return value
        raise ConfigError(f"{where} is {value!r}", hint=near_miss(str(value), list(known)))

    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, eq=False)
class TaskResults:
    """Results of every arm on every task, told or pending. Rules do not write to the arrays.

    All have shape (n_arms, n_tasks). An arm that was never requested has a row of NaN and False.
    """

    tasks: TaskSet
    scores: Floats
    """NaN where there is no score: not told, or failed."""
    stderrs: Floats
    """Standard errors of the scores; NaN where none was told."""
    seconds: Floats
    """Durations; NaN where none was told."""
    told: Bools
    """True where a score or a failure was told."""
    asked: Bools
    """True where a result was told or is pending."""

    @classmethod
    def empty(cls, n_arms: int, tasks: TaskSet) -> TaskResults:
        shape = (n_arms, len(tasks.names))
        scores, stderrs, seconds = (np.full(shape, math.nan) for _ in range(3))
        told, asked = (np.zeros(shape, np.bool_) for _ in range(2))
        return cls(tasks, scores, stderrs, seconds, told, asked)

    def take(self, arm: int, observation: Observation) -> None:
        for task in (*observation.scores, *observation.failed):
            at = arm, self.tasks.index(task)
            self.scores[at], self.stderrs[at], self.seconds[at] = observation.numbers_of(task)
            self.told[at] = self.asked[at] = True

    def with_pending(self, pending: Iterable[tuple[int, Pull]]) -> TaskResults:
        """Return the results with these pulls of arms marked as requested.

        Raises ConfigError for a pull of a task that is not in the set.
        """
        asked = self.told.copy()
        for arm, pull in pending:
            asked[arm, [self.tasks.index(task) for task in pull.tasks or self.tasks.names]] = True
        return replace(self, asked=asked)


@dataclass(frozen=True, eq=False)
class History:
    """Everything told and pending, in canonical form: sorted by arm index, so that no sum and no
    decision depends on the order in which results arrived.

    When every task of an arm was told, the arm is scored if it has a reward, and failed otherwise.
    """

    table: ArmTable
    seed: int
    """The only source of randomness: ``default_rng([seed, ...])``."""
    scored: tuple[int, ...]
    """Ascending indices of the arms that have a reward."""
    rewards: Floats
    """Shape (len(scored),): their rewards."""
    failed: tuple[int, ...]
    """Ascending indices of the arms that were told on all tasks and have no reward."""
    pending: tuple[int, ...]
    """Ascending indices of the arms that are being evaluated on any task."""
    results: TaskResults

    @cached_property
    def taken(self) -> frozenset[int]:
        """Indices of the arms that must not be proposed for all their tasks."""
        return frozenset((*self.scored, *self.failed, *self.pending))


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """A way to pick pulls. The fields of a subclass are its options.

    Raises ConfigError for an option that is not as its field declares (see ``number_option``).
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for option in fields(self):
            if check := option.metadata.get("check"):
                value = check(f"{self.name}: {option.name}", getattr(self, option.name))
                object.__setattr__(self, option.name, value)

    @abstractmethod
    def choose(self, history: History, n: int) -> list[Pull]:
        """Return at most ``n`` different arms, none of them taken. This is a pure function.

        A rule that chooses tasks proposes arms with tasks that were not requested before.
        """

    def finalists(self, history: History) -> Finalists | None:
        """Return the arms that are still in the running, from a rule that requests tasks in parts;
        None while they are not known, and from all other rules.
        """
        return None


class Finalists(NamedTuple):
    """The arms among which to find the best, and the tasks by which to compare them."""

    arms: tuple[int, ...]
    tasks: tuple[int, ...]
    """Indices of tasks on which all of these arms were told."""
    leader: int | None = None
    """The best of these arms; None: the arm with the highest reward over ``tasks``."""


def first_best(values: Floats | Sequence[float]) -> int:
    """Return the lowest position of the highest value; values equal to 12 decimals are a tie.

    Without the rounding, the last bit of a sum would decide between symmetric arms.
    """
    return int(np.argmax(np.round(values, TIE_DECIMALS)))


def _row_means(values: Floats) -> Floats:
    means = np.full(len(values), math.nan)
    for index, row in enumerate(values):
        numbers = row[~np.isnan(row)].tolist()
        if numbers:
            # An exact sum, so that the order of the tasks cannot change the last bit.
            means[index] = math.fsum(numbers) / len(numbers)
    return means


@dataclass(frozen=True, slots=True)
class Reward:
    """One arm's reward."""

    mean: float
    """Mean of the arm's scores."""
    stderr: float | None
    """Standard error of ``mean``, assuming that errors of tasks are independent; None: unknown."""


def rewards_of(
    results: TaskResults, arms: Sequence[int], *, tasks: Sequence[int] | None = None
) -> dict[int, Reward]:
    """Return the rewards of some arms over some tasks, by default all tasks.

    An arm with more failed tasks than scores has no reward. A task without a standard error counts
    with the root mean square of the arm's known ones. Failed tasks are left out; nothing adjusts
    the reward for how hard they are.
    """
    columns = list(range(len(results.tasks.names)) if tasks is None else tasks)
    where = np.ix_(list(arms), columns)
    scores, stderrs, told = results.scores[where], results.stderrs[where], results.told[where]
    known = ~np.isnan(scores)
    counts, failures = known.sum(axis=1), (told & ~known).sum(axis=1)
    usable = np.flatnonzero((counts > 0) & (counts >= failures)).tolist()
    scores, stderrs = scores[usable], stderrs[usable]
    means = _row_means(scores)
    return {
        int(arms[index]): Reward(float(means[row]), _stderr(stderrs[row], known[index]))
        for row, index in enumerate(usable)
    }


def gaps_of(
    results: TaskResults, top: int, arms: Sequence[int], *, tasks: Sequence[int]
) -> list[tuple[float, float | None]]:
    """How far the reward of each arm is below that of ``top``, and how much of it may be noise.

    Both are from the paired differences on the tasks that both arms have. The noise is the half
    width of the 95 % interval of their mean; None: they have fewer than two tasks in common.
    """
    values = results.scores[np.ix_([top, *arms], tasks)]
    behind = values[0] - values[1:]
    means = _row_means(behind)
    squares = (behind - means[:, None]) ** 2
    found: list[tuple[float, float | None]] = []
    for row, known in enumerate(~np.isnan(behind)):
        count = int(known.sum())
        spread = math.sqrt(math.fsum(squares[row][known]) / max(count, 1))
        noise = _student(count - 1) * spread / math.sqrt(count - 1) if count > 1 else None
        found.append((float(means[row]) if count else 0.0, noise))
    return found


def _student(free: int) -> float:
    """Student's two-sided 95 % quantile; above 6 degrees of freedom at most 2 % too large."""
    return (12.71, 4.31, 3.19, 2.78, 2.58, 2.45)[free - 1] if free < 7 else 1.98 + 2.7 / free


def _stderr(stderrs: np.ndarray, known: np.ndarray) -> float | None:
    told = stderrs[known & ~np.isnan(stderrs)]
    if not told.size:
        return None
    typical = math.fsum(float(error) ** 2 for error in told) / told.size
    squares = np.where(np.isnan(stderrs), typical, stderrs**2)[known]
    return math.sqrt(math.fsum(squares.tolist())) / len(squares)


@dataclass(frozen=True, slots=True)
class RandomOrder(Rule):
    """All arms in a random order, which depends only on the seed."""

    name: ClassVar[str] = "random"

    def choose(self, history: History, n: int) -> list[Pull]:
        order = np.random.default_rng([history.seed]).permutation(len(history.table.arms))
        free = [int(index) for index in order if index not in history.taken]
        return [Pull(history.table.ids[i]) for i in free[:n]]


class OwnPolicy(Protocol):
    """What a user writes; the constructor takes the arms, a seed and the policy's options.

    For every ask hpctk creates a new object with copies of the arms, and calls ``tell`` with each
    result so far, in the order of the arms. Equal arguments and results must lead to equal asks:
    draw random numbers from the seed only.
    """

    def __init__(self, arms: Sequence[Arm], seed: int, **options: Any) -> None: ...

    def tell(self, arm: str, reward: float | None) -> None:
        """Take the reward of an arm, higher is better; None: its evaluation failed."""
        ...

    def ask(self, pending: Sequence[str]) -> str | None:
        """Return the id of the next arm, which has no result and is not ``pending``. None: wait, or
        stop if no arm is pending. Called once for each arm of a round; ``pending`` contains the
        arms of the round before it."""
        ...


@dataclass(frozen=True, slots=True)
class OwnRule(Rule):
    """Picks arms with a user's class."""

    name: ClassVar[str] = "own"
    called: str = ""
    """``module:Class``."""
    make: Callable[..., OwnPolicy] = field(default=OwnPolicy)
    options: dict[str, Any] = field(default_factory=dict)

    def choose(self, history: History, n: int) -> list[Pull]:
        table, ids = history.table, history.table.ids
        try:
            policy = self.make(copy.deepcopy(table.arms), history.seed, **self.options)
            told = dict.fromkeys(history.failed) | dict(
                zip(history.scored, history.rewards.tolist(), strict=True)
            )
            for index in sorted(told):
                policy.tell(ids[index], told[index])
            pending = [ids[index] for index in history.pending]
            known = set(ids)
            asked: list[Pull] = []
            while len(asked) < n and (arm := policy.ask(pending)) is not None:
                if arm not in known:
                    message = f"policy {self.called!r} requested {str(arm)[:80]!r}, an unknown arm"
                    raise ConfigError(message, hint="return the id of an arm, or None")
                if table.index(arm) in told or arm in pending:
                    message = f"policy {self.called!r} asked again for arm {arm!r}"
                    hint = "request arms without a result that are not pending"
                    raise ConfigError(message, hint=hint)
                asked.append(Pull(arm))
                pending = [*pending, arm]
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            message = f"policy {self.called!r} failed: {describe(error)}"
            raise ConfigError(message, hint="docs/how-to/policies.md has an example") from error
        return asked
