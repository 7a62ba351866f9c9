"""Workers and functions that a notebook submits to a real Slurm."""

from __future__ import annotations

import ast
import os
import re
import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import nbformat
import pytest

from hpc_toolkit import notebook
from hpc_toolkit.queue.presence import FINISHED, Presence, read_presence
from hpc_toolkit.run import Run
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


def test_an_element_of_an_array_starts_again_alone(lab: LabUnderTest, cwd: Path) -> None:
    run = sleeping(240, 0.2)
    jobs = notebook.submit_workers(run, 3, cluster="lab", gpus_per_node=1, array=True, time=10)
    working(run, 3)
    last = f"{jobs.jobs[0].job}_2"

    lab.run("scancel", "--batch", "--signal=USR1", last)

    assert jobs.wait()
    assert_whole(run)
    assert sorted(one.restart for one in workers_of(run)) == [0, 0, 0, 1]


def test_a_job_that_may_not_start_again_ends_with_75(lab: LabUnderTest, cwd: Path) -> None:
    run = sleeping(200, 0.2)
    jobs = notebook.submit_workers(run, 2, cluster="lab", requeue=False)
    (job,) = (job.job for job in jobs.jobs)
    working(run, 2)

    lab.run("scancel", "--batch", "--signal=USR1", job)

    assert jobs.wait() is False
    lab.wait_for(job, "FAILED")
    assert "ExitCode=75:0" in lab.scontrol("show", "job", job)
    assert run.status().stages["items"].claimed == 0


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


def test_the_other_ranks_go_on_when_one_is_killed(lab: LabUnderTest, cwd: Path) -> None:
    run = sleeping(60, 0.2)
    jobs = notebook.submit_workers(run, 4, cluster="lab", gpus_per_node=2)
    victim = working(run, 4)[0]

    os.kill(victim.pid, signal.SIGKILL)

    assert jobs.wait()
    lab.wait_for(jobs.jobs[0].job, "COMPLETED")
    assert Run.open(run.root).status().stages["items"].done == 60
    assert len([one for one in workers_of(run) if one.state == FINISHED]) == 3


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


# --- calls ---

CALLS = """
import os, sys, time
import pandas
from hpc_toolkit import Executor

table = pandas.DataFrame({"a": range(40)})
offset = 100

def noted(number):
    with open("trace", "a", buffering=1) as file:
        file.write(f"{number}\\n")
    time.sleep(1)
    return int(table["a"][number]) + offset

with Executor("runs/x") as executor:
    jobs = executor.slurm(cluster="lab", nodes=2, gpus_per_node=2, time=10)
    made = executor.map(noted, range(40))
    square = executor.submit(lambda x: x * offset, 3)
    print(sum(made), square.result(), [job.job for job in jobs.jobs])
"""


def test_calls_of_a_killed_script_go_on_in_its_job_and_none_runs_twice(
    lab: LabUnderTest, cwd: Path
) -> None:
    (cwd / "script.py").write_text(CALLS)
    argv = [sys.executable, "script.py"]
    trace = cwd / "trace"
    with subprocess.Popen(argv, cwd=cwd, env=lab.env) as script:
        wait_until(lambda: trace.exists() and len(trace.read_text().split()) > 6, "calls")
        script.kill()
    run = Run.open(cwd / "runs/x")
    victim = next(one for one in workers_of(run) if one.state != FINISHED)
    os.kill(victim.pid, signal.SIGKILL)

    done = subprocess.run(argv, cwd=cwd, env=lab.env, check=True, capture_output=True, text=True)

    (job,) = notebook.WorkerJobs.open(run).jobs
    assert done.stdout == f"{sum(range(40)) + 4000} 300 ['{job.job}']\n"
    assert f"has job {job.job} of this request: it is not sent again" in done.stderr
    counts = Run.open(run.root).status().stages["items"]
    assert (counts.done, counts.duplicates) == (41, 0)
    assert len(trace.read_text().split()) <= 41  # the call of the killed worker began twice
    lab.wait_for(job.job, "COMPLETED")

    again = subprocess.run(argv, cwd=cwd, env=lab.env, check=True, capture_output=True, text=True)

    assert again.stdout == f"{sum(range(40)) + 4000} 300 []\n"
    assert [one.job for one in notebook.WorkerJobs.open(run).jobs] == [job.job]


def test_cells_of_a_notebook_make_calls_in_a_job(lab: LabUnderTest, cwd: Path) -> None:
    path = cwd / "calls.ipynb"
    cells = [nbformat.v4.new_code_cell(CALLS, id="calls")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)

    shown = execute(path, cwd, lab.env).text("calls")

    assert f"{sum(range(40)) + 4000} 300" in shown
    assert re.search(r"\d+ of 41 calls done", shown)
    assert f"{sum(range(40)) + 4000} 300 []" in execute(path, cwd, lab.env).text("calls")
