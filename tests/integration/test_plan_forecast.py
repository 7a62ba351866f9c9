"""A plan of a run that works, beside what became of it."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from simulation.cluster import simulate
from simulation.scenario import Group, Scenario
from simulation.worker import STAGE

from hpc_toolkit.planning.forecast import Forecaster
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec
from tests.integration.realrun import wait_until

if TYPE_CHECKING:
    from simulation.worker import VirtualClock

    from tests.integration.realrun import Hpctk


@pytest.mark.soak  # unit/test_plan_run.py compares a plan with what came
@pytest.mark.slow
def test_a_plan_of_a_run_that_works_is_kept_and_compared_with_what_came(hpctk: Hpctk) -> None:
    run = hpctk.make_sleeping(60, 0.4)
    work = hpctk.start("work", "run", "--workers", "2")
    wait_until(lambda: len(hpctk.noted("end")) >= 3, "3 items")

    planned = hpctk("plan", "run", "--nodes", "1", "-o", "plan.json", "--json")
    early = hpctk("plan", "run", "--check", "plan.json")
    assert work.ended().code == 0
    late = hpctk("plan", "run", "--check", "plan.json", "--json")

    plan = planned.json
    assert planned.code == 0, planned.err
    assert plan == json.loads((hpctk.cwd / "plan.json").read_text())
    assert plan["items"] + plan["done"] == 60
    assert plan["now"]["workers"] == 2
    # Nothing is quicker than all of them in turn; what is slower a busy machine may be.
    assert plan["now"]["time_s"]["median"] > 0.8 * 0.4 * plan["items"] / 2
    assert early.code in (0, 75)
    assert late.code == 0
    assert late.json["complete"]
    assert late.json["real_s"] >= 0.4 * (plan["items"] - 2) / 2
    assert len(run.results()) == 60


def planned(seed: int) -> tuple[float, float, float, float]:
    """Interval and truth of one simulated run, planned when 10 of 150 items had ended."""
    chance = random.Random(seed)
    seconds = tuple(chance.lognormvariate(2.0, 0.5) for _ in range(150))
    scenario = Scenario(groups=(Group(seconds, 5.0),), workers=4, seed=seed)
    spec = StageSpec(name=STAGE, workload=WorkloadSpec(function="none:none"), group_by="group")
    manifest = Manifest(run="simulated", stages=(spec,))
    found: list[Any] = []

    def look(clock: VirtualClock) -> None:
        view = RunView(RunPaths(root), manifest)
        forecaster = Forecaster(read_work(view, clock, given="run"), draws=60)
        found.append((clock.now, forecaster.forecast(None).time_s))

    root = Path(f"run-{seed}")
    root.mkdir()
    outcome = simulate(scenario, root, look=(10, look))
    at, time_s = found[0]
    return time_s.low, time_s.median, time_s.high, outcome.makespan_s - at


def test_runs_on_a_virtual_clock_end_as_their_plans_say(hpctk: Hpctk) -> None:
    assert hpctk.cwd == Path.cwd()

    results = [planned(seed) for seed in range(9)]

    # Ten items of this spread tell the mean to a standard error of 17 %.
    assert statistics.median(abs(median / real - 1) for _, median, _, real in results) <= 0.25
    assert sum(low <= real <= high for low, _, high, real in results) >= 7
