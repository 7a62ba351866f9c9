"""Comparisons of policies: searches, statistics, reports and the command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from hpc_toolkit import cli
from hpc_toolkit.bandit import Arm, ArmTable
from hpc_toolkit.bandit.bench.comparison import (
    Entrant,
    Plan,
    entrants,
    reached_at,
    reports,
    searches,
)
from hpc_toolkit.bandit.bench.replay import ScoreTable, Trace
from hpc_toolkit.bandit.policy import TaskSet
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from tests.unit.test_bandit_replay import small_table

if TYPE_CHECKING:
    from click.testing import Result


def bench(policies: str, table: ScoreTable | None = None, **options: Any) -> dict[str, Any]:
    plan = Plan(entrants=entrants(policies), **{"seeds": 3, "gpus": (1, 4), **options})
    *_, last = reports(small_table() if table is None else table, plan)
    return last


def ladder(arms: int, good: int) -> ScoreTable:
    """Arms of which so many are within 1 % of the best."""
    scores = np.concatenate([np.linspace(0.1, 0.5, arms - good), np.linspace(0.995, 1.0, good)])
    line = tuple(Arm(f"a{n}", "g", (float(n),)) for n in range(arms))
    return ScoreTable(ArmTable(line, ("x",)), TaskSet(("t",)), scores[:, None])


def test_random_order_needs_as_many_pulls_as_combinatorics_says() -> None:
    arms, good, seeds = 39, 4, 400
    plan = Plan(entrants=entrants("random"), seeds=seeds, pulls=None, until=0.99)

    found = searches(plan.entrants[0], ladder(arms, good), plan)

    pulls = np.array([len(trace.arms) for trace in found])
    # The first of m marked places among N is expected at (N + 1) / (m + 1).
    assert pulls.mean() == pytest.approx(40 / 5, abs=4 * pulls.std() / math.sqrt(seeds))


def test_a_report_counts_what_its_searches_did() -> None:
    table = small_table()
    report = bench("random", table, seeds=1, pulls=None)
    trace = next(searches(Entrant("random", "random", {}), table, Plan(entrants=[], seeds=1)))

    one = report["policies"][0]
    place = int(np.argmax(trace.known >= table.means.max())) + 1
    goal = one["to_goal"]["1"]
    assert goal["pulls"]["median"] == goal["pulls"]["p90"] == place
    assert goal["evaluations"]["median"] == 3 * place
    assert goal["gpu_s"]["median"] == trace.gpu_s[place - 1] == goal["wall_s_1"]["median"]
    assert goal["wall_s_4"]["median"] == trace.wall_s(4)[place - 1]
    assert one["ended"] == {"exact": 1.0}
    assert table.seconds is not None
    assert report["exhaustive"]["gpu_s"] == table.seconds.sum()
    assert report["exhaustive"]["wall_s"]["4"] == table.seconds.sum() / 4
    assert report["exhaustive"]["evaluations"] == 36


def test_a_goal_that_is_never_reached_is_null() -> None:
    report = bench("random", ladder(30, 1), pulls=1)

    found = report["policies"][0]["to_goal"]["0.99"]["pulls"]
    assert found == {"median": None, "p90": None, "reached": 0.0}
    assert "gpu_s" not in report["exhaustive"]


def test_of_a_policy_that_leaves_a_good_arm_again_the_last_way_to_it_counts() -> None:
    table = ladder(6, 1)
    known = np.array([0.1, 1.0, 0.2, 1.0, 1.0])
    trace = Trace(table, (0, 5, 1, 2, 3), ((0,),) * 5, (0, 1, 2, 3, 4), known)

    assert reached_at(trace, 0.99) == 4.0


def test_a_table_without_a_positive_score_is_refused() -> None:
    table = ladder(5, 1)

    with pytest.raises(ConfigError, match="the best reward of the table is not positive"):
        bench("random", ScoreTable(table.arms, table.tasks, table.scores - 2.0))


def invoke(*words: str) -> Result:
    return CliRunner().invoke(cli.load_commands("bandit"), ["bandit", "bench", *words])


def hpctk(*words: str) -> tuple[int, str]:
    result = invoke(*words)
    if isinstance(result.exception, HpcToolkitError):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "out.svg"], "out.svg: unknown format '.svg'"),
        (["--gpus", "1,many"], "--gpus: '1,many' is not a list of numbers"),
        (["--asks", "three"], "asks: 'three'"),
        (["--until", "nan"], "until: nan"),
        (["--until", "1.5"], "until: 1.5"),
        (["--seeds", "0"], "seeds: 0"),
        (["-o", "gone/out.json"], "gone/out.json: there is no directory .*gone"),
        (["--table", "gone.csv"], "gone.csv: no such file"),
        (["--table", "synthetic:x"], "synthetic:x: not a table of scores"),
    ],
)
def test_the_command_refuses_what_it_cannot_use(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hpctk(*words)
