"""Recorded scores of every arm on every evaluation task, to replay searches on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.arms import ArmTable, with_metrics
from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats, Observation
from hpc_toolkit.bandit.rule import Stream
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpc_toolkit.bandit.policy import TaskSet


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """All arms with their scores on all tasks.

    Raises ConfigError for an empty task set, for arrays whose shape is not (arms, tasks), for a
    number that is not finite or too large, and for negative durations or standard errors.
    """

    arms: ArmTable
    """The arms; their features may have gaps."""
    tasks: TaskSet
    scores: Floats
    """Shape (n_arms, n_tasks), finite; higher is better."""
    seconds: Floats | None = None
    """Shape (n_arms, n_tasks): seconds of each evaluation on one GPU; None: not known."""
    stderrs: Floats | None = None
    """Shape (n_arms, n_tasks): standard errors of the scores; None: not known."""
    metrics: Mapping[str, Floats] = field(default_factory=dict)
    """Further measurements of the arms by name, shape (n_arms,) each; NaN: not known."""

    def __post_init__(self) -> None:
        shape = (len(self.arms.arms), len(self.tasks.names))
        if not self.tasks.names:
            message = "the table has no task"
            raise ConfigError(message, hint="give at least one task")
        _check_numbers("scores", self.scores, shape)
        for name, numbers in (("seconds", self.seconds), ("stderrs", self.stderrs)):
            if numbers is not None:
                _check_numbers(name, numbers, shape, low=0.0)
        for name, column in self.metrics.items():
            _check_shape(f"metric {name!r}", column, shape[:1])

    @cached_property
    def means(self) -> Floats:
        """Shape (n_arms,): each arm's mean over all tasks, by which searches are judged."""
        return np.asarray(self.scores.mean(axis=1))

    @cached_property
    def measured_arms(self) -> ArmTable:
        """The arms with the metrics as further features; see ``arms.with_metrics``."""
        rows = {
            arm: {name: float(column[index]) for name, column in self.metrics.items()}
            for index, arm in enumerate(self.arms.ids)
        }
        return with_metrics(self.arms, rows, list(self.metrics))

    def part(self, arms: Sequence[int], tasks: Sequence[int]) -> ScoreTable:
        """Return the table of only some arms and tasks, in the given order; features are kept."""
        kept = ArmTable(tuple(self.arms.arms[i] for i in arms), self.arms.feature_names)
        cut = np.ix_(arms, tasks)
        return ScoreTable(
            arms=kept,
            tasks=self.tasks.part(tasks),
            scores=self.scores[cut],
            seconds=None if self.seconds is None else self.seconds[cut],
            stderrs=None if self.stderrs is None else self.stderrs[cut],
            metrics={name: column[list(arms)] for name, column in self.metrics.items()},
        )

    def drawn(self, seed: int, *, share: float, tasks: int) -> ScoreTable:
        """Return a random part: ``share`` of the arms, rounded down, and ``tasks`` tasks.

        They are drawn without replacement and keep the order of this table. Raises ConfigError for
        a part that would be empty or larger than the table.
        """
        if not math.isfinite(share):
            message = f"a subtable with {share} of the arms"
            raise ConfigError(message, hint="use a share above 0, at most 1")
        arms = int(share * len(self.arms.arms))
        for what, wanted, there in (
            ("arms", arms, len(self.arms.arms)),
            ("tasks", tasks, len(self.tasks.names)),
        ):
            if not 1 <= wanted <= there:
                message = f"a part of {wanted} of {there} {what}"
                raise ConfigError(message, hint=f"draw 1 to {there} {what}")
        rng = np.random.default_rng([seed, Stream.PARTS])
        rows = np.sort(rng.permutation(len(self.arms.arms))[:arms])
        columns = np.sort(rng.permutation(len(self.tasks.names))[:tasks])
        return self.part([int(i) for i in rows], [int(j) for j in columns])

    def observation(self, arm: int, tasks: Iterable[int]) -> Observation:
        """Return the observation that an evaluation of an arm on some tasks would have given."""
        chosen = list(tasks)

        def told(numbers: Floats | None) -> dict[str, float]:
            if numbers is None:
                return {}
            return {self.tasks.names[j]: float(numbers[arm, j]) for j in chosen}

        return Observation(
            self.arms.ids[arm], told(self.scores), told(self.stderrs), told(self.seconds)
        )


def _check_shape(what: str, numbers: Floats, shape: tuple[int, ...]) -> None:
    if numbers.shape != shape:
        message = f"{what}: shape {numbers.shape}, expected {shape}"
        raise ConfigError(message, hint="one row for each arm, one column for each task")


def _check_numbers(
    what: str, numbers: Floats, shape: tuple[int, int], *, low: float = -LARGEST_NUMBER
) -> None:
    _check_shape(what, numbers, shape)
    wrong = np.argwhere(~((numbers >= low) & (numbers <= LARGEST_NUMBER)))
    if len(wrong):
        arm, task = (int(place) for place in wrong[0])
        message = f"{what}: {numbers[arm, task]} at arm {arm}, task {task}"
        hint = "leave out arms and tasks that lack numbers"
        raise ConfigError(message, hint=hint)
