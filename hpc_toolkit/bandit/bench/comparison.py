"""Policies compared by many searches on recorded scores."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.bandit.bench.outcome import goal_of, summary, timed
from hpc_toolkit.bandit.bench.replay import Asks, replay
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.bandit.bench.entrants import Entrant
    from hpc_toolkit.bandit.bench.recorded import ScoreTable
    from hpc_toolkit.bandit.bench.replay import Trace
    from hpc_toolkit.bandit.bench.walltime import Order

FORMAT = 1
"""Of the report; a program that reads it may rely on the keys of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared, and by how many searches."""

    entrants: Sequence[Entrant]
    """The policies."""

    asks: Asks = field(default_factory=lambda: Asks("rounds", 1))
    """How many pulls at once. A policy that asks for tasks in parts asks for whole rungs instead.
    """

    pulls: int | None = 60
    """A search ends after so many pulls of whole arms; None: when the policy has finished."""

    until: float | None = None
    """A search ends when it knows an arm of this share of the best, above 0 and at most 1; there
    are no curves then, and the share is one of the goals."""

    seeds: int = 10
    """Searches of each policy on each table."""

    subtables: int = 0
    """Random parts of the table to search on instead of the whole."""

    share: float = 0.5
    """How many of the arms a part has."""

    tasks: int | None = None
    """How many tasks a part has; None: all."""

    first: int = 0
    """The first seed of searches and parts."""

    gpus: tuple[int, ...] = (1, 32)
    """For how many GPUs the wall-clock is simulated, where the table has durations."""

    order: Order = "longest"
    """Which of the evaluations that may begin goes first; see ``walltime.finish_times``."""

    def __post_init__(self) -> None:
        counts = {"seeds": self.seeds, "pulls": self.pulls, "tasks": self.tasks}
        counts |= {f"gpus[{n}]": number for n, number in enumerate(self.gpus)}
        for what, number in counts.items():
            if number is not None and number < 1:
                message = f"{what}: {number}"
                raise ConfigError(message, hint="give at least 1")
        if self.until is not None and not 0 < self.until <= 1:
            message = f"until: {self.until}"
            raise ConfigError(message, hint="a share of the best mean, above 0, at most 1")
        if self.subtables < 0 or self.first < 0:
            message = f"subtables: {self.subtables}, first seed: {self.first}"
            raise ConfigError(message, hint="give 0 or more")

    def tables(self, table: ScoreTable) -> list[ScoreTable]:
        """What is searched. Raises ConfigError for parts that cannot be drawn."""
        if not self.subtables:
            return [table]
        tasks = self.tasks or len(table.tasks.names)
        seeds = range(self.first, self.first + self.subtables)
        return [table.drawn(seed, share=self.share, tasks=tasks) for seed in seeds]


def run_bench(
    table: ScoreTable, plan: Plan, on_search: Callable[[Entrant, int, int], None] | None = None
) -> dict[str, Any]:
    """Search, and sum up: the last of :func:`reports`, with all policies."""
    *_, last = reports(table, plan, on_search)
    return last


def reports(
    table: ScoreTable, plan: Plan, on_search: Callable[[Entrant, int, int], None] | None = None
) -> Iterator[dict[str, Any]]:
    """Search, and sum up after each policy: what ``json.dumps`` writes as strict JSON.

    Each report has one policy more than the one before; ``left_out`` names those that it lacks.
    None holds a score, an arm or a task of the table. ``on_search`` is called before every search
    with its policy, its number and how many there are. Raises ConfigError, before any search, for
    a table whose best mean is not positive, since the goals are shares of it, and for options and
    tables that a policy cannot be made with.
    """
    tables = plan.tables(table)
    if min(float(one.means.max()) for one in tables) <= 0:
        message = "the best mean score of the table is not positive"
        raise ConfigError(message, hint="goals are shares of it; add a constant to the scores")
    for entrant in plan.entrants:
        entrant.make(tables[0], plan.first, plan.asks)
    head = _head(tables, plan)
    found: list[dict[str, Any]] = []
    for entrant in plan.entrants:
        found.append(_compete(entrant, tables, plan, on_search))
        left_out = [other.label for other in plan.entrants[len(found) :]]
        yield {**head, "policies": list(found), "left_out": left_out}


def _head(tables: Sequence[ScoreTable], plan: Plan) -> dict[str, Any]:
    """What a report says of the comparison."""
    return {
        "format": FORMAT,
        "arms": len(tables[0].arms.arms),
        "tasks": len(tables[0].tasks.names),
        "tables": len(tables),
        "seeds": plan.seeds,
        "first_seed": plan.first,
        "asks": str(plan.asks),
        "pulls": plan.pulls,
        "until": plan.until,
        "order": plan.order,
        "exhaustive": _exhaustive(tables, plan),
    }


def searches(
    entrant: Entrant,
    tables: Sequence[ScoreTable],
    plan: Plan,
    on_search: Callable[[Entrant, int, int], None] | None = None,
) -> Iterator[tuple[int, Trace]]:
    """Every search of one policy, with the number of its table.

    On table t the seeds are those from ``first + t * seeds`` on, the same for all policies.
    """
    for place, table in enumerate(tables):
        goal = math.inf if plan.until is None else goal_of(table, plan.until)
        for number in range(plan.seeds):
            done = place * plan.seeds + number
            if on_search is not None:
                on_search(entrant, done, len(tables) * plan.seeds)
            asks = Asks("rounds", len(table.arms.arms)) if entrant.in_parts else plan.asks
            policy = entrant.make(table, plan.first + done, asks)
            pulls = None if entrant.in_parts else plan.pulls
            yield place, replay(table, policy, asks, pulls=pulls, until=goal)


def _exhaustive(tables: Sequence[ScoreTable], plan: Plan) -> dict[str, Any]:
    """What evaluating everything takes: medians over tables."""
    found: dict[str, Any] = {"evaluations": float(np.median([t.evaluations for t in tables]))}
    if timed(tables[0]):
        total = [float(table.seconds.sum()) for table in tables if table.seconds is not None]
        found["gpu_s"] = float(np.median(total))
        found["wall_s"] = {
            str(gpus): float(np.median([_all_at_once(table, gpus) for table in tables]))
            for gpus in plan.gpus
        }
    return found


def _all_at_once(table: ScoreTable, gpus: int) -> float:
    """No schedule is faster: nobody idle, and nothing shorter than its longest evaluation."""
    assert table.seconds is not None
    return max(float(table.seconds.sum()) / gpus, float(table.seconds.max()))


def _compete(
    entrant: Entrant,
    tables: Sequence[ScoreTable],
    plan: Plan,
    on_search: Callable[[Entrant, int, int], None] | None,
) -> dict[str, Any]:
    found = list(searches(entrant, tables, plan, on_search))
    numbers = summary(
        [trace for _, trace in found],
        [place for place, _ in found],
        gpus=plan.gpus,
        order=plan.order,
        until=plan.until,
        whole=not entrant.in_parts,
    )
    return {"policy": entrant.label, **numbers}
