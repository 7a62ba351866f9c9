"""A campaign in one Slurm job: who decides may die and move; the arms stay the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_toolkit.campaign.decisions import SEARCH, read_decisions
from hpc_toolkit.results.gather import NotCompleteError
from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY
from tests.integration.test_campaign import CAMPAIGN
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, Rehearsal, wait_until
from tests.slurm.templatesite import Site

pytestmark = [pytest.mark.slow]

RUN = "runs/toy"


def toy(cwd: Path) -> tuple[Path, dict[str, object]]:
    """A campaign of 48 arms whose tasks take up to half a second, and options of its job."""
    shutil.copy(REPOSITORY / "tests/integration/toy_campaign.py", cwd)
    (cwd / "toy.toml").write_text(CAMPAIGN)
    return cwd / "toy.toml", {"nodes": 3, "ntasks_per_node": 2}


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    site = Site(lab, tmp_path, RUN)
    toy(tmp_path)
    site.hpctk("init", RUN, "--campaign", "toy.toml")
    return site


@pytest.fixture(scope="module")
def undisturbed(lab: LabUnderTest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The arms that were asked for, in their order, without Slurm."""
    site = Site(lab, tmp_path_factory.mktemp("undisturbed"), RUN)
    toy(site.cwd)
    site.hpctk("campaign", "run", "toy.toml", "--workers", "2")
    return asks(site)


def asks(site: Site) -> list[list[str]]:
    path = site.cwd / RUN / "bandit/trials.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record["arms"] for record in records if record["type"] == "ask"]


def submit(site: Site, slowest_s: float = 0.5) -> str:
    env = (("TOY_SLOWEST_S", str(slowest_s)),)
    return site.submit("campaign", env=env, max_restarts=2)


def coordinators(site: Site) -> list[int]:
    """Processes of ``hpctk campaign coordinate`` that were started in this site's directory."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            here = (directory / "cwd").readlink() == site.cwd
        except OSError:
            continue
        if here and words[2:5] == [b"hpc_toolkit", b"campaign", b"coordinate"]:
            found.append(int(directory.name))
    return found


def wait_for_search(site: Site) -> None:
    """Until some arms were asked for, and not all."""
    path = site.cwd / RUN / "bandit/trials.jsonl"
    wait_until(lambda: path.exists() and len(asks(site)) >= 3, "the search")


def check_complete(site: Site, job: str, undisturbed: list[list[str]]) -> None:
    status = site.status()
    assert status["complete"]
    assert status["stages"]["tasks"]["failed"] == 0
    assert asks(site) == undisturbed
    assert "best arm " in site.said(job)


def test_both_stages_run_in_one_job_and_its_log_ends_with_the_outcome(
    site: Site, undisturbed: list[list[str]]
) -> None:
    job = submit(site, 0.05)

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    check_complete(site, job, undisturbed)


def test_a_killed_coordinator_is_started_again(site: Site, undisturbed: list[list[str]]) -> None:
    job = submit(site)
    wait_for_search(site)

    for pid in coordinators(site):
        os.kill(pid, signal.SIGKILL)

    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    assert "the coordinator was killed (code 137): starting it again" in site.said(job)
    check_complete(site, job, undisturbed)


def test_a_campaign_that_was_warned_goes_on_in_its_next_start(
    site: Site, undisturbed: list[list[str]]
) -> None:
    job = submit(site)
    wait_for_search(site)

    site.warn(job)
    wait_until(lambda: "requeueing" in site.said(job), "requeueing")
    wait_until(lambda: not coordinators(site), "the end of the coordinator")

    assert site.end_of(job) == ("COMPLETED", 0, 1), site.said(job)
    check_complete(site, job, undisturbed)


@pytest.fixture
def started(site: Site) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts commands that are no part of any job."""
    with ExitStack() as ends:

        def start(*words: str) -> subprocess.Popen[bytes]:
            argv = [sys.executable, "-m", "hpc_toolkit", *words]
            process = ends.enter_context(subprocess.Popen(argv, cwd=site.cwd, env=site.lab.env))
            ends.callback(process.kill)
            return process

        yield start


def test_two_that_decide_make_one_sequence(
    site: Site, started: Callable[..., subprocess.Popen[bytes]], undisturbed: list[list[str]]
) -> None:
    arms = [arm for asked in undisturbed for arm in asked]
    held = site.cwd / "held.json"
    held.write_text(json.dumps(arms[5:]))
    elsewhere = started("campaign", "coordinate", RUN)
    workers = started("work", RUN, "--workers", "2")
    wait_for_search(site)
    decided = asks(site)  # nobody else can have: there is no job yet

    job = submit(site)
    wait_until(lambda: len(coordinators(site)) == 2, "two that decide")
    held.unlink()
    wait_until(lambda: len(asks(site)) > len(decided) + 2, "more asks")
    assert site.jobs(job)[0].state == "RUNNING"
    elsewhere.kill()
    workers.terminate()

    assert decided == undisturbed[: len(decided)]
    assert site.end_of(job) == ("COMPLETED", 0, 0), site.said(job)
    check_complete(site, job, undisturbed)


def test_a_coordinator_that_cannot_go_on_ends_the_ranks_and_the_job(site: Site) -> None:
    manifest = json.loads((site.cwd / RUN / "run.json").read_text())
    manifest["campaign"]["search"]["policy"] = "gone"
    (site.cwd / RUN / "run.json").write_text(json.dumps(manifest))
    job = submit(site)

    state, code, restarts = site.end_of(job)

    assert (state, restarts) == ("FAILED", 0)
    assert code not in {0, 75, 143}
    assert f"the coordinator ended with code {code}: telling the ranks to finish" in site.said(job)


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


def demo(cwd: Path) -> tuple[Path, dict[str, object]]:
    """The campaign of ``make demo``."""
    for name in ("mini-pythia.toml", "mini_pythia.py"):
        shutil.copy(REPOSITORY / "examples" / name, cwd)
    # As many threads as the local workers have: the nodes of a lab share this machine's cores.
    return cwd / "mini-pythia.toml", {"nodes": 2, "ntasks_per_node": 1, "cpus_per_task": 1}


@pytest.mark.soak  # the tests above warn one, faults/test_faults.py compares the arms
@pytest.mark.timeout(5400)
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
    rehearsal = Rehearsal(lab, tmp_path, {"TOY_SLOWEST_S": "0.5"})
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
