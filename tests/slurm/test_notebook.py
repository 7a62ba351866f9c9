"""Workers and functions that a notebook submits to a real Slurm."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit import notebook
from hpc_toolkit.queue.presence import FINISHED, Presence, read_presence
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.clusters.facts import load_cluster
from tests.notebooks import EXAMPLE, execute
from tests.slurm.rehearsal import MEASURED, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.reallab import LabUnderTest

pytestmark = pytest.mark.slow

SLEEP = "hpc_toolkit.science.workloads.synthetic:Sleep"


@pytest.fixture
def cwd(lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test, whose process speaks with the lab."""
    for name in set(os.environ) - set(lab.env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(lab.slurm_conf))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sleeping(count: int, seconds: float, path: str = "run") -> Run:
    items: list[dict[str, Any]] = [{"id": number, "seconds": seconds} for number in range(count)]
    return Run.create(path, items, workload=SLEEP)


def workers_of(run: Run) -> list[Presence]:
    found = (read_presence(path) for path in sorted(run.paths.workers.glob("*.json")))
    return [presence for presence in found if presence is not None]


def working(run: Run, count: int) -> list[Presence]:
    def busy() -> list[Presence]:
        found = workers_of(run)
        return found if len(found) >= count and all(one.done for one in found) else []

    return wait_until(busy, f"{count} workers to work")


def assert_whole(run: Run) -> None:
    """All items are done, each once, and all workers leave by themselves, none taken for dead."""
    status = Run.open(run.root).status()
    assert status.complete
    # A run is complete with its last result, which its workers survive by a moment.
    wait_until(lambda: {one.state for one in workers_of(run)} == {FINISHED}, "workers to leave")
    status = Run.open(run.root).status()
    counts = status.stages["items"]
    assert (counts.done, counts.duplicates, counts.retried) == (counts.total, 0, 0)
    assert status.deaths == 0


def test_the_example_tells_the_nodes_and_gpus_of_its_workers(lab: LabUnderTest, cwd: Path) -> None:
    done = execute(EXAMPLE, cwd, {**lab.env, "HPCTK_CLUSTER": "lab"})

    assert "#SBATCH --gpus-per-node=l40s:2" in done.text("preview")
    assert "48 of 48" in done.html("watch")
    places = ast.literal_eval(done.text("rows"))
    MEASURED.append(f"the notebook's workers saw (node, CUDA_VISIBLE_DEVICES): {places}")
    nodes = {node for node, _ in places}
    assert len(nodes) == 2
    assert nodes <= set(lab.nodes)
    # Each of the two ranks of a node has one of its two GPUs.
    assert places == [(node, gpu) for node in sorted(nodes) for gpu in ("0", "1")]
    run = Run.open(cwd / "runs/from-notebook")
    assert_whole(run)
    assert [one.rank for one in sorted(workers_of(run), key=lambda one: one.rank)] == [0, 1, 2, 3]


def test_a_warned_job_drains_and_starts_again_with_what_is_left(
    lab: LabUnderTest, cwd: Path
) -> None:
    run = sleeping(120, 0.2)
    jobs = notebook.submit_workers(run, 4, cluster="lab", gpus_per_node=2, time=10)
    (job,) = (job.job for job in jobs.jobs)
    working(run, 4)

    lab.run("scancel", "--batch", "--signal=USR1", job)

    assert jobs.wait()
    assert_whole(run)
    assert sorted((one.restart, one.rank) for one in workers_of(run)) == [
        (restart, rank) for restart in (0, 1) for rank in range(4)
    ]
    lab.wait_for(job, "COMPLETED")


def test_cancelled_workers_give_their_items_back_and_stay_cancelled(
    lab: LabUnderTest, cwd: Path
) -> None:
    run = sleeping(400, 0.2)
    jobs = notebook.submit_workers(run, 4, cluster="lab", gpus_per_node=4)
    (job,) = (job.job for job in jobs.jobs)
    working(run, 4)

    jobs.cancel()

    assert jobs.wait() is False
    lab.wait_for(job, "CANCELLED")
    assert jobs.states() == {job: "CANCELLED"}
    status = run.status()
    assert (status.deaths, status.stages["items"].claimed) == (0, 0)
    assert {one.state for one in workers_of(run)} == {FINISHED}


def test_a_paused_run_ends_its_job_for_good(lab: LabUnderTest, cwd: Path) -> None:
    run = Run.create("run", [{"n": n} for n in range(40)], command="test {n} -lt 0")
    jobs = notebook.submit_workers(run, 2, cluster="lab")

    assert jobs.wait() is False
    lab.wait_for(jobs.jobs[0].job, "FAILED")
    assert "paused" in run.status().reason


SUBMIT = """
from hpc_toolkit import notebook
jobs = notebook.submit_workers("run", 2, cluster="lab", gpus_per_node=2)
assert jobs.wait()
"""


def test_workers_are_submitted_from_inside_a_job(lab: LabUnderTest, cwd: Path) -> None:
    run = sleeping(8, 0.1)
    (cwd / "submit.py").write_text(SUBMIT)
    (cwd / "job.sh").write_text(f"#!/bin/bash\nsrun {shlex.quote(sys.executable)} submit.py\n")

    # Without leaving its memory option out, srun of the new job refuses to start.
    job = lab.sbatch("--mem-per-cpu=1G", "--time=5", cwd / "job.sh", cwd=cwd)

    lab.wait_for(job, "COMPLETED")
    assert_whole(run)


# --- functions ---


def placed() -> Any:
    def place(number: int) -> tuple[int, str, str]:
        return number, os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]

    # Pickled by value, since it has no name: the nodes do not find this module.
    return place


def test_functions_are_an_array_in_parts_in_an_odd_folder(lab: LabUnderTest, cwd: Path) -> None:
    site = replace(load_cluster("lab"), max_array_size=2)
    folder = cwd / "it's a folder, é #1"
    executor: Any = notebook.executor(site, folder=folder, gpus_per_node=1, time=5)

    jobs = executor.map_array(placed(), range(5))
    found = [job.result() for job in jobs]

    assert [number for number, _, _ in found] == list(range(5))
    assert {node for _, node, _ in found} <= set(lab.nodes)
    assert all(gpus for _, _, gpus in found)
    arrays = {job.job_id.partition("_")[0] for job in jobs}
    assert len(arrays) == 3
