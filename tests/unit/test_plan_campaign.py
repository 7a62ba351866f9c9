"""What a plan counts of a campaign that has not asked for everything yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.forecast import Forecaster, Guess
from hpc_toolkit.planning.nodes import node_of
from hpc_toolkit.planning.plan import Plan, as_lines, make_plan
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.planning.work import Work
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from tests.manualclock import ManualClock
from tests.unit.playedcampaign import Played, toy

SITE = load_cluster("generic")
NODE = node_of(SITE, workers=16)
SEARCH = {"policy": "random", "budget": 8, "pending": 2}


def played(
    root: Path, patch: pytest.MonkeyPatch, search: dict[str, Any], waits: int, at: float = 9e9
) -> Work:
    """A campaign of 20 arms and 3 tasks whose coordinator was killed after so many waits."""
    campaign = Played(root, toy(search), patch)
    assert campaign.killed(waits)
    run = Run.open(root)
    return read_work(run.view, ManualClock(at), given="r", campaign=run.manifest.campaign)


def plan_of(work: Work, guess: Guess | None = None) -> Plan:
    return make_plan(work, guess, [1], SITE, NODE, draws=4)


def asked(work: Work) -> int:
    """Items of the tasks that are left, those to come aside."""
    return sum(len(s.left) - s.coming for s in work.stages if s.name == "tasks")


@pytest.mark.parametrize(
    ("search", "evaluations"),
    [
        (SEARCH, 24),
        ({**SEARCH, "evaluations": 15}, 15),
        ({**SEARCH, "evaluations": 1000}, 24),
        ({**SEARCH, "exhaustive": True}, 60),
    ],
)
def test_the_budget_of_a_campaign_is_counted(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, search: dict[str, Any], evaluations: int
) -> None:
    work = played(fast_dir / "r", monkeypatch, search, 2)

    (tasks,) = work.stages
    done = len(tasks.seen)
    assert done > 0
    assert done + asked(work) + work.coming == evaluations
    items = [*tasks.left, *(one.item for one in tasks.seen)]
    assert len({(i["checkpoint"], i["layer"], i["task"]) for i in items}) == len(items)
    assert any(f"{work.coming} of those left" in line for line in as_lines(plan_of(work)))


def test_workers_beyond_what_is_asked_at_once_do_not_help(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = played(fast_dir / "r", monkeypatch, SEARCH, 2)

    plan = plan_of(work)
    few = make_plan(work, None, [1], SITE, node_of(SITE, workers=6), draws=4)

    assert work.most_workers == 6
    many, six = (one.choices[0].forecast.time_s.median for one in (plan, few))
    assert many == pytest.approx(six)
    assert any("work for 6 workers at once" in line for line in as_lines(plan))


def test_tasks_of_which_nothing_is_known_are_left_out_and_named(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = Played(fast_dir / "r", toy(SEARCH), monkeypatch, lambda _: None)
    assert campaign.killed(0)
    run = Run.open(fast_dir / "r")
    work = read_work(run.view, ManualClock(9e9), given="r", campaign=run.manifest.campaign)

    assert (work.coming, asked(work)) == (24, 0)
    with pytest.raises(ConfigError, match="durations are unknown"):
        plan_of(work)
    assert plan_of(work, Guess(10.0)).items == 44


def test_a_round_waits_for_the_round_before(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tasks,) = played(fast_dir / "r", monkeypatch, SEARCH, 2).stages

    rounds = [batch.round for batch in tasks.batches if batch.round]
    count = len(set(rounds))
    assert [rounds.count(number) for number in sorted(set(rounds))] == [6] * count
    together = [replace(batch, round=1) for batch in tasks.batches if batch.round]
    coming = replace(tasks, batches=together, left=tasks.left, most_workers=None)
    apart = replace(coming, batches=[batch for batch in tasks.batches if batch.round])
    times = [
        Forecaster(Work(run="r", at=0.0, stages=(one,)), draws=40).forecast(100).time_s.median
        for one in (coming, apart)
    ]
    assert times[1] > 1.5 * times[0]
