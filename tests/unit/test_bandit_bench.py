"""Comparisons of policies: searches, statistics, reports and the command."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from hpc_toolkit import cli
from hpc_toolkit.bandit import Arm, ArmTable
from hpc_toolkit.bandit.bench import comparison
from hpc_toolkit.bandit.bench.comparison import (
    Entrant,
    Plan,
    as_lines,
    entrants,
    reached_at,
    reports,
    searches,
    spread,
)
from hpc_toolkit.bandit.bench.replay import ScoreTable, Trace, replay
from hpc_toolkit.bandit.policy import TaskSet
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from tests.unit.test_bandit_replay import small_table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result

    from hpc_toolkit.bandit import Policy


SHORT = ("--policies", "random", "--seeds", "2", "--pulls", "5")


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


def test_a_report_is_strict_json_and_names_nothing_of_the_table() -> None:
    text = json.dumps(bench("random,racing"), allow_nan=False)

    names = [*small_table().arms.ids, *small_table().tasks.names]
    assert not [name for name in names if f'"{name}"' in text]


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


@pytest.mark.parametrize("until", [1e-9, 0.985, 1.0])
def test_searches_end_at_any_share_of_the_best_which_is_a_goal_then(until: float) -> None:
    report = bench("random", pulls=None, until=until)

    to_goal = report["policies"][0]["to_goal"]
    assert max(float(goal) for goal in to_goal) == until
    assert len(to_goal) == len({*(one for one in (0.98, 0.99, 0.995, 1.0) if one < until), until})
    assert all(found["pulls"]["reached"] == 1.0 for found in to_goal.values())
    assert as_lines(report)[0].startswith(f"to {100 * min(until, 0.99):g}% of the")


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


def replay_until(policy: str, error: type[BaseException]) -> Callable[..., Trace]:
    """Searches that end with an error in the second one of a policy."""
    begun: list[str] = []

    def replayed(table: ScoreTable, made: Policy, *args: Any, **options: Any) -> Trace:
        begun.append(made.rule.name)
        if begun.count(policy) == 2:
            raise error
        return replay(table, made, *args, **options)

    return replayed


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), (ZeroDivisionError, 1)], ids=["Ctrl-C", "bug"]
)
def test_a_comparison_that_is_ended_shows_and_writes_the_policies_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    words = [*SHORT, "--policies", "random,gp-ei,gp-ucb"]
    whole = json.loads(hpctk(*words, "--json")[1])
    monkeypatch.setattr(comparison, "replay", replay_until("gp-ei", error))

    ended = invoke(*words, "--json", "-o", str(tmp_path / "out.json"))

    assert ended.exit_code == code
    report = json.loads(ended.stdout)
    assert report == whole | {"policies": whole["policies"][:1], "left_out": ["gp-ei", "gp-ucb"]}
    assert json.loads((tmp_path / "out.json").read_text()) == report
    assert "not finished, left out: gp-ei, gp-ucb\n" in ended.stderr


def test_spread_counts_searches_that_never_reached_the_goal() -> None:
    assert spread(range(1, 11)) == {"median": 5.5, "p90": 9.0, "reached": 1.0}
    half = spread([1.0, 2.0, math.inf, math.inf])
    assert half == {"median": None, "p90": None, "reached": 0.5}
    most = spread([3.0] * 9 + [math.inf])
    assert (most["median"], most["p90"], most["reached"]) == (3.0, 3.0, 0.9)
