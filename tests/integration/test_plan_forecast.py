"""Forecasts of simulated runs, beside what became of them."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.cluster import simulate
from simulation.scenario import Group, Scenario
from simulation.worker import STAGE

from hpc_toolkit.planning.forecast import Forecaster
from hpc_toolkit.planning.reading import read_work
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec, WorkloadSpec

if TYPE_CHECKING:
    from simulation.worker import VirtualClock

    from tests.integration.realrun import Hpctk


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
