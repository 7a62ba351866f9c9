"""Recorded scores of every arm on every task, and searches that are replayed on them."""

from __future__ import annotations

import heapq
import math
import re
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpc_toolkit.bandit.arms import ArmTable, with_metrics
from hpc_toolkit.bandit.policy import LARGEST_NUMBER, Floats, Observation, Pull
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hpc_toolkit.bandit.asktell import Policy
    from hpc_toolkit.bandit.policy import TaskSet


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """All arms with their scores on all tasks.

    Raises ConfigError for an empty task set, for a number that is not finite or too large, and for
    negative durations or standard errors.
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
        if not self.tasks.names:
            raise ConfigError("the table has no task", hint="give at least one task")
        for what, low in (("scores", -LARGEST_NUMBER), ("seconds", 0.0), ("stderrs", 0.0)):
            if (numbers := getattr(self, what)) is None:
                continue
            wrong = np.argwhere(~((numbers >= low) & (numbers <= LARGEST_NUMBER)))
            for arm, task in wrong.tolist():
                message = f"{what}: {numbers[arm, task]} at arm {arm}, task {task}"
                raise ConfigError(message, hint="leave out arms and tasks that lack numbers")

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

    def observation(self, arm: int, tasks: Iterable[int]) -> Observation:
        """Return the observation that an evaluation of an arm on some tasks would have given."""
        chosen = list(tasks)
        scores, stderrs, seconds = (
            {} if known is None else {self.tasks.names[j]: float(known[arm, j]) for j in chosen}
            for known in (self.scores, self.stderrs, self.seconds)
        )
        return Observation(self.arms.ids[arm], scores, stderrs, seconds)


def finish_times(
    durations: Sequence[Sequence[float]], told_before: Sequence[int], gpus: int
) -> Floats:
    """Return when the last evaluation of each pull ends, in seconds; shape (n_pulls,).

    This is an event simulation. Each GPU runs one evaluation at a time and starts the longest one
    that may begin. Deciding, loading models and claiming cost nothing, so the result is a lower
    bound for a run with this order. A pull without evaluations ends when it may begin.

    ``durations`` has the seconds of the evaluations of each pull, in the order of asks.
    ``told_before`` has for each pull how many results had to be told before it was requested.
    Results arrive in the order of asks, so a pull begins when that many first pulls ended.
    """
    ends, now = np.zeros(len(durations)), 0.0
    left = [len(seconds) for seconds in durations]
    ready: list[tuple[float, int]] = []  # a heap of negative durations, with their pulls
    running: list[tuple[float, int]] = []  # a heap of the times when evaluations end
    asked = told = 0
    while True:
        # Tell ended pulls and request pulls that waited for them, until neither is possible.
        while True:
            if asked < len(left) and told_before[asked] <= told:
                ends[asked] = now
                for seconds in durations[asked]:
                    heapq.heappush(ready, (-seconds, asked))
                asked += 1
            elif told < asked and not left[told]:
                told += 1
            else:
                break
        while ready and len(running) < gpus:
            negative, pull = heapq.heappop(ready)
            heapq.heappush(running, (now - negative, pull))
        if not running:
            return ends
        now, pull = heapq.heappop(running)
        left[pull] -= 1
        ends[pull] = now


@dataclass(frozen=True, slots=True)
class Asks:
    """How many pulls run at once, and when the policy decides."""

    kind: Literal["rounds", "window"]
    """``rounds``: request ``size`` pulls, tell them all, ask again. ``window``: whenever the oldest
    running pull has ended, tell it and request one more."""
    size: int

    @classmethod
    def parse(cls, text: str) -> Asks:
        """Parse ``one``, ``rounds:N`` or ``window:N``. Raises ConfigError for any other text."""
        match = re.fullmatch(r"(rounds|window):([1-9][0-9]{0,5})", text)
        if text != "one" and not match:
            raise ConfigError(f"asks: {text!r}", hint="write one, rounds:N or window:N")
        size = int(match[2]) if match else 1
        return cls("window" if match and match[1] == "window" else "rounds", size)

    def __str__(self) -> str:
        return "one" if self.size == 1 else f"{self.kind}:{self.size}"


@dataclass(frozen=True, eq=False)
class Trace:
    """One search. Pulls are numbered in the order in which they were requested and told."""

    table: ScoreTable
    arms: tuple[int, ...]
    tasks: tuple[tuple[int, ...], ...]
    told_before: tuple[int, ...]
    """For each pull, the number of results told before it was requested."""
    known: Floats
    """Shape (n_pulls,): the table's mean of the arm that the policy recommends once this pull is
    told; NaN while it recommends none."""

    @cached_property
    def evaluations(self) -> Floats:
        """Shape (n_pulls,): number of evaluations in this and all earlier pulls."""
        return np.cumsum([float(len(tasks)) for tasks in self.tasks])

    @cached_property
    def gpu_s(self) -> Floats:
        """Shape (n_pulls,): GPU seconds of this and all earlier pulls."""
        return np.cumsum([math.fsum(seconds) for seconds in self.durations])

    @cached_property
    def durations(self) -> list[list[float]]:
        """Seconds of each evaluation, by pull. Raises ConfigError if the table has no durations."""
        if self.table.seconds is None:
            message = "the score table has no durations"
            raise ConfigError(message, hint="add a column t_<task> with seconds for every task")
        pulls = zip(self.arms, self.tasks, strict=True)
        return [self.table.seconds[arm, list(tasks)].tolist() for arm, tasks in pulls]

    def wall_s(self, gpus: int) -> Floats:
        """Return shape (n_pulls,): when each pull can be told, in seconds from the start."""
        ends = finish_times(self.durations, self.told_before, gpus)
        return np.asarray(np.maximum.accumulate(ends))


def replay(
    table: ScoreTable,
    policy: Policy,
    asks: Asks,
    *,
    pulls: int | None = None,
    until: float = math.inf,
) -> Trace:
    """Let a policy search, and tell it the scores of the table.

    The policy has no results yet, and was made with the arms of the table. The search ends after
    ``pulls`` pulls, once the recommended arm has at least the mean ``until`` in the table, or when
    the policy has nothing more to request.
    """
    ids, names, means = table.arms.ids, table.tasks.names, table.means
    arms, tasks, told_before, known = list[int](), list[tuple[int, ...]](), list[int](), []
    requested: dict[int, set[int]] = defaultdict(set)
    waiting, value, whole = deque[int](), math.nan, True
    limit, finished = math.inf if pulls is None else pulls, False

    def tell(n: int) -> None:
        """Tell the policy the oldest ``n`` pulls in flight, and record the value known then."""
        nonlocal value
        for left in reversed(range(n)):
            number = waiting.popleft()
            policy.tell(table.observation(arms[number], tasks[number]))
            if whole:
                # The best mean is what ``policy.best`` would recommend, but is much faster.
                value = float(np.fmax(value, means[arms[number]]))
            elif not left:
                best = policy.best()
                value = math.nan if best is None else float(means[table.arms.index(best.arm)])
            known.append(value)

    while not finished and len(arms) < limit and not value >= until:
        if asks.kind == "window" or not waiting:
            most = int(min(asks.size - len(waiting), limit - len(arms)))
            pending = [Pull(ids[arms[i]], tuple(names[j] for j in tasks[i])) for i in waiting]
            for proposal in policy.ask(most, pending):
                arm = table.arms.index(proposal.arm)
                if proposal.tasks:
                    some = tuple(map(table.tasks.index, proposal.tasks))
                else:  # of all that were not requested before
                    some = tuple(sorted(set(range(len(names))) - requested[arm]))
                requested[arm].update(some)
                waiting.append(len(arms))
                arms.append(arm)
                tasks.append(some)
                told_before.append(len(known))
                whole = whole and len(some) == len(names)
        finished = not waiting
        tell(min(1, len(waiting)) if asks.kind == "window" else len(waiting))
    tell(len(waiting))
    return Trace(table, tuple(arms), tuple(tasks), tuple(told_before), np.array(known, np.float64))
