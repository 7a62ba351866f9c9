"""What a rule may look at when it picks pulls, and the shape of a rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hpc_toolkit.bandit.pulls import TaskSet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hpc_toolkit.bandit.arms import ArmTable
    from hpc_toolkit.bandit.policy import Proposal

TIE_DECIMALS = 12
"""Values that agree to this many decimals are a tie."""


@dataclass(frozen=True, eq=False)
class TaskResults:
    """What was told and is pending of every arm on every task; its arrays must not be written to.

    All have shape (n_arms, n_tasks). An arm that was never asked has a row of NaN and False.
    """

    tasks: TaskSet
    """The columns. Where the bandit was not given its tasks: those told so far, by name."""

    scores: NDArray[np.float64]
    """NaN where there is no score: not told, or failed."""

    stderrs: NDArray[np.float64]
    """Standard errors of the scores; NaN where none was told."""

    seconds: NDArray[np.float64]
    """Durations; NaN where none was told."""

    told: NDArray[np.bool_]
    """Where a score or a failure was told."""

    asked: NDArray[np.bool_]
    """Where something was told or is pending."""


def no_results(n_arms: int) -> TaskResults:
    """Nothing told, nothing pending, no tasks known."""
    numbers, flags = np.empty((n_arms, 0)), np.empty((n_arms, 0), np.bool_)
    return TaskResults(TaskSet(()), numbers, numbers, numbers, flags, flags)


@dataclass(frozen=True, eq=False)
class History:
    """Everything told and pending, in canonical form: sorted by arm index, so that no sum and no
    decision depends on the order in which results arrived.

    An arm is scored or failed when every task of it was told, and it has a reward or has none.
    Where the bandit was not given its tasks, that is as soon as anything of it was told.
    """

    table: ArmTable
    """All arms."""

    seed: int
    """The only source of randomness: ``default_rng([seed, ...])``."""

    scored: tuple[int, ...]
    """Ascending indices of the arms that have a reward."""

    rewards: NDArray[np.float64]
    """Shape (len(scored),): their rewards."""

    failed: tuple[int, ...]
    """Ascending indices of the arms that were told and have no reward."""

    pending: tuple[int, ...]
    """Ascending indices of the arms that are being evaluated, on whichever tasks."""

    results: TaskResults | None = None
    """Task by task; ``by_task`` is the same and never None."""

    scalariser: str = "mean"
    """How scores become rewards: a name in ``scalarise.SCALARISERS``."""

    @cached_property
    def taken(self) -> frozenset[int]:
        """Indices of all arms that may not be proposed as a whole."""
        return frozenset((*self.scored, *self.failed, *self.pending))

    @property
    def by_task(self) -> TaskResults:
        """Results task by task, which rules over tasks look at."""
        return no_results(len(self.table.arms)) if self.results is None else self.results

    @property
    def tasks(self) -> TaskSet:
        """The tasks that the columns of ``scores`` and the like are of."""
        return self.by_task.tasks

    @property
    def scores(self) -> NDArray[np.float64]:
        """Shape (n_arms, n_tasks); NaN where there is none."""
        return self.by_task.scores

    @property
    def stderrs(self) -> NDArray[np.float64]:
        """Shape (n_arms, n_tasks); NaN where there is none."""
        return self.by_task.stderrs

    @property
    def seconds(self) -> NDArray[np.float64]:
        """Durations, shape (n_arms, n_tasks); NaN where there is none."""
        return self.by_task.seconds

    @property
    def asked(self) -> NDArray[np.bool_]:
        """Shape (n_arms, n_tasks): told, failed or pending."""
        return self.by_task.asked

    def with_pending(self, arms: Sequence[int]) -> History:
        """As it would be with these arms pending on all their tasks as well."""
        more = [arm for arm in arms if arm not in self.taken]
        asked = self.asked.copy()
        asked[more] = True
        return replace(
            self,
            pending=tuple(sorted((*self.pending, *more))),
            results=replace(self.by_task, asked=asked),
        )


class Rule(Protocol):
    """A way to pick pulls. A frozen dataclass whose fields are its options."""

    name: ClassVar[str]
    """The name that ``make_policy`` knows it by."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def choose(self, history: History, n: int) -> list[Proposal]:
        """At most ``n`` different arms, none of them taken. A pure function.

        A rule over tasks proposes arms with tasks instead, none of them asked.
        """


class Finalists(NamedTuple):
    """The arms among which the best is to be found, and what to compare them by."""

    arms: tuple[int, ...]
    """Indices of arms."""

    tasks: tuple[int, ...]
    """Indices of tasks that all of them were told on."""

    leader: int | None = None
    """The best of them; None: the one of the highest reward over ``tasks``."""

    dropped: tuple[int, ...] = ()
    """Indices of tasks that they were told on too, but that gave no scores to compare."""


@runtime_checkable
class Judge(Protocol):
    """A rule that says which arms are still in the running."""

    def finalists(self, history: History) -> Finalists | None:
        """The arms to compare; None while it cannot say."""


def first_best(values: NDArray[np.float64] | Sequence[float]) -> int:
    """The lowest position of the highest value; values that agree to 12 decimals are equal.

    Without the rounding, the last bit of a sum would decide between arms that are symmetric.
    """
    return int(np.argmax(np.round(values, TIE_DECIMALS)))
