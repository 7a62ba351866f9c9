"""A campaign as one Slurm job, both stages, preempted while the bandit waits for several arms."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_toolkit.campaign.decisions import SEARCH, read_decisions
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY
from tests.integration.test_campaign import CAMPAIGN
from tests.slurm.conftest import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@dataclass(frozen=True)
class Searched:
    """What a campaign's log says of its search."""

    asked: list[str]
    """Arms that the policy chose, in order."""
    told: int
    """How many of them it has the results of."""

    @classmethod
    def of(cls, run: Path) -> Searched:
        if not (run / "run.json").exists():
            return cls([], 0)
        stage = Run.open(run).view.stages["tasks"]
        stage.poll_log()
        decisions = read_decisions(stage.log.segments.values())
        asked = [pull.arm for one in decisions if one.why == SEARCH for pull in one.pulls]
        return cls(asked, sum(len(one.tells) for one in decisions))


def arms_at_work(run: Path) -> set[tuple[str, int]]:
    """Arms that were asked for and lack the result of a task, as (checkpoint, layer)."""
    with pytest.raises(NotCompleteError) as caught:
        Run.open(run).results(stage="tasks")
    return {(item["checkpoint"], item["layer"]) for item in caught.value.pending}


def toy(cwd: Path) -> tuple[Path, dict[str, object]]:
    """A campaign of 48 arms whose tasks take up to half a second."""
    shutil.copy(REPOSITORY / "tests/integration/toy_campaign.py", cwd)
    (cwd / "toy.toml").write_text(CAMPAIGN)
    return cwd / "toy.toml", {"nodes": 3, "ntasks_per_node": 2}


def demo(cwd: Path) -> tuple[Path, dict[str, object]]:
    """The campaign of ``make demo``."""
    for name in ("mini-pythia.toml", "mini_pythia.py"):
        shutil.copy(REPOSITORY / "examples" / name, cwd)
    # As many threads as the local workers have: the nodes of a lab share this machine's cores.
    return cwd / "mini-pythia.toml", {"nodes": 2, "ntasks_per_node": 1, "cpus_per_task": 1}


@pytest.mark.soak  # test_campaign_job.py warns one, faults/test_coordinator.py compares the arms
@pytest.mark.parametrize(
    ("make", "least"),
    [
        pytest.param(toy, 2, id="toy"),
        # Nothing holds its tasks, but an arm that was asked for last is hardly ever done at once.
        pytest.param(demo, 1, id="demo", marks=[pytest.mark.soak, pytest.mark.torch]),
    ],
)
def test_preempted_campaign_asks_for_the_same_arms_as_an_undisturbed_one(
    lab: LabUnderTest,
    tmp_path: Path,
    make: Callable[[Path], tuple[Path, dict[str, object]]],
    least: int,
) -> None:
    rehearsal = Rehearsal(lab.lab, tmp_path, {"TOY_SLOWEST_S": "0.5"})
    file, options = make(tmp_path)
    began = time.monotonic()
    rehearsal.hpctk("campaign", "run", file, "--workers", 2, "--run", "undisturbed", timeout_s=2700)
    undisturbed_s = time.monotonic() - began
    rehearsal.hpctk("init", rehearsal.run, "--campaign", file)
    script = rehearsal.render("campaign", **options)

    # The tasks of later arms wait, so that after four tells two arms have no result for sure.
    held = tmp_path / "held.json"
    held.write_text(json.dumps(Searched.of(tmp_path / "undisturbed").asked[5:]))
    began = time.monotonic()
    job = rehearsal.sbatch(script, rehearsal.run)
    wait_until(lambda: Searched.of(rehearsal.run).told >= 4, "four tells", limit_s=900)
    rehearsal.preempt(*("--nodes=8", "--exclusive", "--mem=0"))
    wait_until(lambda: rehearsal.state(job) != "RUNNING", "preemption")
    at, at_work = Searched.of(rehearsal.run), arms_at_work(rehearsal.run)
    held.unlink()
    rehearsal.wait_for_end(job, limit_s=900)

    found, wanted = Searched.of(rehearsal.run), Searched.of(tmp_path / "undisturbed")
    measured = rehearsal.measure()
    MEASURED.append(
        f"campaign: {len(found.asked)} arms in {time.monotonic() - began:.0f} s"
        f" (undisturbed, 2 local workers: {undisturbed_s:.0f} s), preempted after"
        f" {at.told} tells with {len(at_work)} arms at work"
    )
    assert rehearsal.exit_code(job) == "0:0", rehearsal.log()
    assert rehearsal.log().count("DUE TO PREEMPTION") >= 1
    assert {presence["restart"] for presence in measured.workers.values()} == {0, 1}
    assert len(at_work) >= least
    assert len(at.asked) < len(wanted.asked), "the search was over before the preemption"
    assert found.asked == wanted.asked
    assert not measured.deaths
    status = rehearsal.status()
    assert status["complete"]
    rows = rehearsal.rows()
    assert {(row["state"], row["attempts"]) for row in rows} == {("done", 1)}
    assert len({json.dumps(row["item"]) for row in rows}) == len(rows)
