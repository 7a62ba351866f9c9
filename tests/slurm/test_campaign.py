"""A campaign in one Slurm job: who decides may die and move; the arms stay the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.realrun import REPOSITORY
from tests.integration.test_campaign import CAMPAIGN
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import Rehearsal, wait_until
from tests.slurm.templatesite import Site

pytestmark = [pytest.mark.slow]

RUN = "runs/toy"


def toy(lab: LabUnderTest, cwd: Path) -> Site:
    """A directory with a campaign of 48 arms whose tasks take up to half a second."""
    shutil.copy(REPOSITORY / "tests/integration/toy_campaign.py", cwd)
    (cwd / "toy.toml").write_text(CAMPAIGN)
    return Site(lab, cwd, RUN)


@pytest.fixture
def site(lab: LabUnderTest, tmp_path: Path) -> Site:
    site = toy(lab, tmp_path)
    site.hpctk("init", RUN, "--campaign", "toy.toml")
    return site


@pytest.fixture(scope="module")
def undisturbed(lab: LabUnderTest, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The arms that were asked for, in their order, without Slurm."""
    site = toy(lab, tmp_path_factory.mktemp("undisturbed"))
    site.hpctk("campaign", "run", "toy.toml", "--workers", "2")
    return asks(site)


def asks(site: Site | Rehearsal, run: str | Path = RUN) -> list[list[str]]:
    path = site.cwd / run / "bandit/trials.jsonl"
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


@pytest.mark.parametrize("how", ["warned", pytest.param("preempted", marks=pytest.mark.soak)])
def test_a_campaign_that_was_disturbed_goes_on_in_its_next_start(
    site: Site, undisturbed: list[list[str]], how: str
) -> None:
    job = submit(site)
    wait_for_search(site)

    if how == "warned":
        site.warn(job)
        site.wait_for_text(job, "requeueing")
    else:
        site.lab.preempt()
        site.wait_for_text(job, "DUE TO PREEMPTION")
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
    assert site.lab.state(job) == "RUNNING"
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


@pytest.mark.soak  # with real models; the toy above is disturbed in more ways
@pytest.mark.torch
@pytest.mark.timeout(5400)
def test_the_campaign_of_make_demo_is_preempted_and_asks_for_the_same_arms(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    site = Rehearsal(lab, tmp_path, {})
    for name in ("mini-pythia.toml", "mini_pythia.py"):
        shutil.copy(REPOSITORY / "examples" / name, tmp_path)
    local = ("--workers", 2, "--run", "undisturbed")
    site.hpctk("campaign", "run", "mini-pythia.toml", *local, timeout_s=2700)
    wanted = asks(site, "undisturbed")
    site.hpctk("init", site.run, "--campaign", "mini-pythia.toml")
    # As many threads as the local workers have: the nodes of a lab share this machine's cores.
    script = site.render("campaign", nodes=2, ntasks_per_node=1, cpus_per_task=1)
    job = site.sbatch(script, site.run)
    trials = site.run / "bandit/trials.jsonl"
    wait_until(lambda: trials.exists() and len(asks(site, site.run)) >= 5, "asks", limit_s=900)

    lab.preempt()
    wait_until(lambda: lab.state(job) != "RUNNING", "preemption")
    assert len(asks(site, site.run)) < len(wanted), "the search was over before the preemption"
    site.wait_for_end(job, limit_s=900)

    assert lab.records(job)[0].exit_code == 0, site.log()
    assert "DUE TO PREEMPTION" in site.log()
    assert asks(site, site.run) == wanted
    found = site.measure()
    assert {presence["restart"] for presence in found.workers.values()} == {0, 1}
    assert not found.deaths
    rows = site.rows()
    assert {(row["state"], row["attempts"]) for row in rows} == {("done", 1)}
    assert len({json.dumps(row["item"]) for row in rows}) == len(rows)
