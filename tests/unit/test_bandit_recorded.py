"""How good the policies are, on a table of recorded scores: 175 layers of Pythia, 32 tasks.

Seeds are fixed, so these numbers are the same on every day; each bound leaves room for a small
change of an algorithm, and none for a broken one.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hpc_toolkit.bandit.bench.comparison import Plan, run_bench, searches
from hpc_toolkit.bandit.bench.entrants import entrants
from hpc_toolkit.bandit.bench.replay import Asks
from hpc_toolkit.scoretable import read_score_table

if TYPE_CHECKING:
    from hpc_toolkit.bandit.bench.recorded import ScoreTable

pytestmark = [pytest.mark.recorded, pytest.mark.slow]


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    return read_score_table(Path(os.environ["HPCTK_SCORES_CSV"]))


@cache
def to_99(table: ScoreTable, policy: str, parts: int = 0, asks: str = "one") -> tuple[float, float]:
    """Median and ninth decile of the pulls to 99 % of the best.

    From 40 seeds on the table, or from so many on each of 100 parts: half the arms, 24 tasks.
    """
    plan = Plan(
        entrants=entrants(policy),
        asks=Asks.parse(asks),
        until=0.99,
        pulls=None,
        gpus=(1,),
        seeds=parts or 40,
        subtables=100 if parts else 0,
        tasks=24 if parts else None,
    )
    found = run_bench(table, plan)["policies"][0]["to_goal"]["0.99"]["pulls"]
    return found["median"], found["p90"]


ON = pytest.mark.parametrize("parts", [0, 2], ids=["whole", "parts"])


@ON
def test_the_default_policy_needs_far_fewer_pulls_than_random_order(
    table: ScoreTable, parts: int
) -> None:
    median, p90 = to_99(table, "gp-ucb", parts)
    chance, chance_p90 = to_99(table, "random", parts)

    assert median <= 0.65 * chance
    assert p90 <= 0.4 * chance_p90


@ON
def test_the_default_policy_needs_no_more_pulls_than_optunas(table: ScoreTable, parts: int) -> None:
    median, p90 = to_99(table, "gp-ucb", parts)
    rival, rival_p90 = to_99(table, "optuna-tpe", parts)

    assert median <= rival
    assert p90 <= rival_p90


@ON
def test_rounds_of_eight_need_hardly_more_pulls_than_one_at_a_time(
    table: ScoreTable, parts: int
) -> None:
    one, _ = to_99(table, "gp-ucb", parts)
    eight, _ = to_99(table, "gp-ucb", parts, "rounds:8")

    assert eight <= 1.2 * one


@pytest.mark.parametrize("tasks", [24, 32])
def test_racing_finds_the_best_of_half_the_arms_for_a_twentieth_of_the_time(
    table: ScoreTable, tasks: int
) -> None:
    plan = Plan(entrants=entrants("racing"), seeds=1, subtables=100, tasks=tasks)

    found = [trace for _, trace in searches(plan.entrants[0], plan.tables(table), plan)]

    exact = [trace.known[-1] >= trace.table.means.max() for trace in found]
    assert np.mean(exact) >= 0.9
    shares = [t.gpu_s[-1] / t.table.seconds.sum() for t in found if t.table.seconds is not None]
    assert np.median(shares) <= 0.05


def test_rounds_of_24_keep_32_gpus_twenty_times_as_busy_as_one(table: ScoreTable) -> None:
    plan = Plan(entrants=entrants("gp-ucb"), seeds=5, asks=Asks("rounds", 24), pulls=60)

    speedups = [
        t.gpu_s[-1] / t.wall_s(32)[-1] for _, t in searches(plan.entrants[0], [table], plan)
    ]

    assert min(speedups) >= 20.0


def test_the_last_layer_is_not_the_best(table: ScoreTable) -> None:
    plan = Plan(entrants=entrants("last-layer"), seeds=1, pulls=None)

    trace = next(searches(plan.entrants[0], [table], plan))[1]

    assert trace.known[-1] < 0.99 * table.means.max()
