"""How good the policies are, on a table of recorded scores that HPCTK_SCORES_CSV names.

The table may be of other models, checkpoints and tasks than any that a policy was tried on, so the
bounds are ratios with room: they find a policy that is broken. What each needs on one table is in
benchmarks/results.md. Seeds are fixed: on one table these numbers are the same on every day.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from bandit_bench import drawn, to_goal
from comparison import Plan, entrants, searches
from replay import Asks, ScoreTable, Trace
from scoretable import read_score_table

pytestmark = [pytest.mark.recorded, pytest.mark.slow]


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    return read_score_table(Path(os.environ["HPCTK_SCORES_CSV"]))


def tasks_of_a_part(table: ScoreTable) -> int:
    """Three quarters of the tasks."""
    return max(1, 3 * len(table.tasks.names) // 4)


@cache
def to_99(table: ScoreTable, policy: str, parts: int = 0, asks: str = "one") -> tuple[float, float]:
    """Median and ninth decile of the pulls to 99 % of the best.

    From 40 seeds on the table, or from so many on each of 100 parts: half the arms.
    """
    tables = [drawn(table, seed, tasks_of_a_part(table)) for seed in range(100)]
    of = tables if parts else [table]
    found = to_goal(entrants(policy)[0], of, parts or 40, Asks.parse(asks))
    return found["median"], found["p90"]


ON = pytest.mark.parametrize("parts", [0, 2], ids=["whole", "parts"])


@ON
def test_the_default_policy_needs_fewer_pulls_than_random_order(
    table: ScoreTable, parts: int
) -> None:
    median, p90 = to_99(table, "gp-ucb", parts)
    chance, chance_p90 = to_99(table, "random", parts)

    # Where one arm in ten is good, the first five arms find one as often as not.
    assert median <= max(1.1 * chance, 5.0)
    assert p90 <= 0.6 * chance_p90


@ON
def test_rounds_of_eight_need_hardly_more_pulls_than_one_at_a_time(
    table: ScoreTable, parts: int
) -> None:
    one, _ = to_99(table, "gp-ucb", parts)
    eight, _ = to_99(table, "gp-ucb", parts, "rounds:8")

    # Or half a round more: the first one is taken without knowing anything.
    assert eight <= max(1.2 * one, one + 4.0)


@pytest.mark.parametrize("part", [True, False], ids=["some tasks", "all tasks"])
def test_racing_finds_a_best_arm_of_half_the_arms_for_a_small_part_of_the_time(
    table: ScoreTable, part: bool
) -> None:
    tasks = tasks_of_a_part(table) if part else len(table.tasks.names)
    plan = Plan(entrants=entrants("racing"), seeds=1)

    found = [
        next(searches(plan.entrants[0], drawn(table, seed, tasks), plan)) for seed in range(100)
    ]

    best = np.array([trace.table.means.max() for trace in found])
    known = np.array([trace.known[-1] for trace in found])
    assert np.mean(known >= best) >= 0.5
    assert np.mean(known >= 0.98 * best) >= 0.9
    shares = [t.gpu_s[-1] / t.table.seconds.sum() for t in found if t.table.seconds is not None]
    assert np.median(shares or [0.0]) <= 0.15


def test_rounds_of_24_keep_32_gpus_about_as_busy_as_can_be(table: ScoreTable) -> None:
    plan = Plan(entrants=entrants("gp-ucb"), seeds=5, asks=Asks("rounds", 24), pulls=60)

    for trace in searches(plan.entrants[0], table, plan):
        assert trace.wall_s(32)[-1] <= 1.1 * shortest(trace, 24, 32)


def shortest(trace: Trace, size: int, gpus: int) -> float:
    """No order of evaluations takes less: in a round nobody is idle, or the longest one decides."""
    rounds = [
        [seconds for pull in trace.durations[first : first + size] for seconds in pull]
        for first in range(0, len(trace.arms), size)
    ]
    return sum(max(sum(seconds) / gpus, *seconds) for seconds in rounds)
