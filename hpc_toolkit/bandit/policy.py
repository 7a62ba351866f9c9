"""What goes into a bandit policy and what comes out: proposals, observations, a recommendation."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from hpc_toolkit.bandit.pulls import Pull, TaskSet
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Observation", "Policy", "Proposal", "Pull", "Recommendation", "TaskSet"]

LARGEST_NUMBER = 1e100
"""Squares of larger numbers overflow."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One arm that a policy wants evaluated."""

    arm: str
    """The arm's id."""

    acquisition: float | None
    """What the policy maximised, in units of the reward; None where it maximised nothing."""

    reason: str
    """One line for people."""

    tasks: tuple[str, ...] = ()
    """The tasks to evaluate it on; empty means every task that it was not asked for before."""

    @property
    def pull(self) -> Pull:
        """The arm and the tasks: what ``ask`` must be given as pending until it is told."""
        return Pull(self.arm, self.tasks)


@dataclass(frozen=True, slots=True)
class Observation:
    """What came back for one arm: the scores of all or of some of its evaluation tasks.

    Raises ConfigError for a value that is not a finite number, for a standard error without its
    score, for a task that both scored and failed, and for an observation without any task.
    """

    arm: str
    """The arm's id."""

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
        """A value that ``json.dumps`` writes as strict JSON and ``from_json`` reads exactly."""
        return {
            "arm": self.arm,
            "scores": dict(self.scores),
            "stderrs": dict(self.stderrs),
            "seconds": dict(self.seconds),
            "failed": list(self.failed),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Observation:
        """The observation that ``to_json`` wrote. Raises ConfigError for any other value."""
        try:
            return cls(**{**value, "failed": tuple(value["failed"])})
        except (KeyError, TypeError) as error:
            message = f"not an observation: {type(error).__name__}: {error}"
            raise ConfigError(message, hint="expected a value of Observation.to_json()") from error


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The best arm among those told, and how sure that is."""

    arm: str
    """The id of the arm with the highest reward."""

    mean: float
    """Its reward: see ``scalariser``."""

    stderr: float | None
    """Standard error of ``mean``; None when no task reported one."""

    ties: tuple[str, ...]
    """Other told arms that are no worse than noise: their reward differs from the best by at most
    2 combined standard errors, sqrt(stderr_best^2 + stderr_other^2), an unknown one taken as 0.
    Best first. Arms that were never told are not looked at."""

    failed: tuple[str, ...] = ()
    """Tasks missing from ``mean`` because they failed; the mean is then over fewer tasks than
    that of other arms, and a comparison with them deserves a look."""

    scalariser: str = "mean over tasks"
    """How the scores of several tasks became one reward."""

    tasks: tuple[str, ...] = ()
    """The tasks that ``mean`` is over, and by which the arms were compared. Fewer than all where
    the policy needed no more to decide, or has not come further."""

    dropped: tuple[str, ...] = ()
    """Tasks that the arms were told on and not compared by, because none of them has a score, or
    one alone of more than two: the fault of the task and of no arm."""


class Policy(Protocol):
    """Decides which arms to evaluate next. Pure mathematics: no files, no clock, no global random
    state. The same seed, arms, options, tells and pending arms give the same proposals, in every
    process, whatever the order of the tells and however often ``ask`` was called before.
    """

    @property
    def name(self) -> str:
        """The name that ``make_policy`` knows it by."""

    def ask(self, n: int, pending: Sequence[str | Pull] = ()) -> list[Proposal]:
        """At most ``n`` pulls.

        None while pulls are pending: one of them must be told first. None while no pull is
        pending: the policy has finished.

        ``pending`` must name every pull that was asked and not yet told, an arm's id alone for
        all of its tasks: ``ask`` keeps no record of its answers, so that an ask that got lost is
        simply asked again. No task of an arm is proposed that is told, pending, or proposed before
        in the list; ``ask(n)`` begins as ``ask(m)`` does. Stop rules change no answer.
        """

    def tell(self, observation: Observation) -> None:
        """Take in an arm's results on some tasks. Those of several tells add up, in any order.
        Telling a task again is harmless if its result is equal, else an error."""

    def best(self) -> Recommendation | None:
        """The best arm told so far; None while no arm has a reward."""

    def stop(self, pending: Sequence[str | Pull] = (), *, wall_s: float = 0.0) -> str | None:
        """Why to ask for nothing more, for people; None: no stop rule holds.

        ``wall_s`` is how long the search has lasted, which a policy cannot know.
        """

    def state_dict(self) -> dict[str, Any]:
        """All that the next ``ask`` depends on, but the arms; survives JSON without a change."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become the policy that wrote ``state``; ConfigError if it had other arms or options."""


def number(value: object) -> float | None:
    """A value as a number that an observation may hold; None if it is not one."""
    # To ask the abstract class takes longer than all the rest.
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, Real)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    # NaN is not below anything.
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
