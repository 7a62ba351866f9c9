"""Replay a search on recorded scores: what a policy requests and knows, and when."""

from __future__ import annotations

import heapq
import math
import re
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpc_toolkit.bandit.policy import Floats, Pull
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.bandit.asktell import Policy
    from hpc_toolkit.bandit.bench.recorded import ScoreTable
    from hpc_toolkit.bandit.policy import Proposal


def finish_times(
    durations: Sequence[Sequence[float]], told_before: Sequence[int], gpus: int
) -> Floats:
    """Return when the last evaluation of each pull ends, in seconds; shape (n_pulls,).

    This is an event simulation. Each GPU runs one evaluation at a time and starts the next ready
    one at once. Deciding, loading models and claiming cost nothing, so the result is a lower bound
    for a run with this order. A pull without evaluations ends when it may begin.

    ``durations`` has the seconds of the evaluations of each pull, in the order of asks.
    ``told_before`` has for each pull how many results had to be told before it was requested.
    Results arrive in the order of asks, so a pull begins when that many first pulls ended. The
    longest of all evaluations that may begin goes first.
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
        if text == "one":
            return cls("rounds", 1)
        match = re.fullmatch(r"(rounds|window):([1-9][0-9]{0,5})", text)
        if not match:
            message = f"asks: {text!r}"
            raise ConfigError(message, hint="write one, rounds:N or window:N")
        return cls("window" if match[1] == "window" else "rounds", int(match[2]))

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
    search = _Search(table, policy)
    limit = math.inf if pulls is None else pulls
    finished = False
    while not finished and len(search.arms) < limit and not search.value >= until:
        free = asks.size - len(search.waiting)
        if asks.kind == "window" or not search.waiting:
            search.ask(min(free, int(min(limit - len(search.arms), 2**31))))
        finished = not search.waiting
        search.tell(1 if asks.kind == "window" else len(search.waiting))
    search.tell(len(search.waiting))
    return Trace(
        table=table,
        arms=tuple(search.arms),
        tasks=tuple(search.tasks),
        told_before=tuple(search.told_before),
        known=np.array(search.known, dtype=np.float64),
    )


class _Search:
    def __init__(self, table: ScoreTable, policy: Policy) -> None:
        self.arms: list[int] = []
        self.tasks: list[tuple[int, ...]] = []
        self.told_before: list[int] = []
        self.known: list[float] = []
        self.waiting: deque[int] = deque()
        self.value = math.nan
        self._table = table
        self._policy = policy
        self._asked: dict[int, set[int]] = {}
        self._whole = True

    def ask(self, n: int) -> None:
        ids, tasks_of = self._table.arms.ids, self._table.tasks.part
        pending = [
            Pull(ids[self.arms[number]], tasks_of(self.tasks[number]).names)
            for number in self.waiting
        ]
        for proposal in self._policy.ask(n, pending):
            arm, tasks = self._read(proposal)
            self.told_before.append(len(self.known))
            self.waiting.append(len(self.arms))
            self.arms.append(arm)
            self.tasks.append(tasks)
            self._whole = self._whole and len(tasks) == len(self._table.tasks.names)

    def tell(self, n: int) -> None:
        """Tell the policy the oldest ``n`` pulls in flight, and record the value known then."""
        n = min(n, len(self.waiting))
        for place in range(n):
            number = self.waiting.popleft()
            arm = self.arms[number]
            self._policy.tell(self._table.observation(arm, self.tasks[number]))
            if self._whole:
                # The best mean is what ``policy.best`` would recommend, but is much faster.
                self.value = float(np.fmax(self.value, self._table.means[arm]))
            elif place == n - 1:
                best = self._policy.best()
                means, index = self._table.means, self._table.arms.index
                self.value = math.nan if best is None else float(means[index(best.arm)])
            self.known.append(self.value)

    def _read(self, proposal: Proposal) -> tuple[int, tuple[int, ...]]:
        """Return the indices of a proposal's arm and tasks; without tasks, of all not yet asked."""
        arm = self._table.arms.index(proposal.arm)
        asked = self._asked.setdefault(arm, set())
        if proposal.tasks:
            tasks = tuple(self._table.tasks.index(name) for name in proposal.tasks)
        else:
            every = range(len(self._table.tasks.names))
            tasks = tuple(task for task in every if task not in asked)
        asked.update(tasks)
        return arm, tasks
