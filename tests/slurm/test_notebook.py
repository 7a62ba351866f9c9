"""Workers and functions that a notebook submits to a real Slurm."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

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
