"""Calls of a notebook, of scripts and of joblib, and a sweep of Hydra, in jobs of a real Slurm."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.queue.presence import FINISHED, Presence, read_presence
from hpc_toolkit.run import Run
from hpc_toolkit.submit import read_jobs
from tests.integration.realrun import REPOSITORY
from tests.notebooks import EXAMPLE, execute
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, wait_until

pytestmark = pytest.mark.slow
Script = subprocess.Popen[str]


@pytest.fixture
def cwd(lab: LabUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of the test, whose process speaks with the lab."""
    for name in set(os.environ) - set(lab.env):
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", str(lab.slurm_conf))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(lab: LabUnderTest, cwd: Path, *words: str, err: int | None = None) -> Script:
    """A user's script, just started."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=cwd,
        env={**lab.env, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=err,
        text=True,
    )


def workers_of(run: Run) -> list[Presence]:
    found = (read_presence(path) for path in sorted(run.paths.workers.glob("*.json")))
    return [presence for presence in found if presence is not None]


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

    assert "48 of 48" in done.html("status")
    places = ast.literal_eval(done.text("rows").splitlines()[-1])
    MEASURED.append(f"the notebook's workers saw (node, CUDA_VISIBLE_DEVICES): {places}")
    nodes = {node for node, _ in places}
    assert len(nodes) == 2
    assert nodes <= set(lab.nodes)
    # Each of the two ranks of a node has one of its two GPUs.
    assert places == [(node, gpu) for node in sorted(nodes) for gpu in ("0", "1")]
    run = Run.open(cwd / "runs/from-notebook")
    assert_whole(run)
    assert [one.rank for one in sorted(workers_of(run), key=lambda one: one.rank)] == [0, 1, 2, 3]


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
    while number > 20 and not os.path.exists("go"):
        time.sleep(0.05)
    return int(table["a"][number]) + offset

with Executor("runs/x") as executor:
    jobs = executor.slurm(cluster="lab", nodes=2, gpus_per_node=2, time=10)
    made = executor.map(noted, range(40))
    square = executor.submit(lambda x: x * offset, 3)
    if os.path.exists("killed"):  # the job's workers have calls left for the second script
        open("go", "w").close()
    print(sum(made), square.result(), [job.job for job in jobs])
"""


@pytest.mark.long
def test_calls_of_a_killed_script_go_on_in_its_job_and_none_runs_twice(
    lab: LabUnderTest, cwd: Path
) -> None:
    (cwd / "script.py").write_text(CALLS)
    argv = [sys.executable, "script.py"]
    trace = cwd / "trace"
    with start(lab, cwd, "script.py") as script:
        wait_until(lambda: trace.exists() and len(trace.read_text().split()) > 6, "calls")
        script.kill()
    run = Run.open(cwd / "runs/x")
    victim = next(one for one in workers_of(run) if one.state != FINISHED)
    os.kill(victim.pid, signal.SIGKILL)
    (cwd / "killed").touch()

    done = subprocess.run(argv, cwd=cwd, env=lab.env, check=True, capture_output=True, text=True)

    (job,) = read_jobs(run.paths)
    assert done.stdout == f"{sum(range(40)) + 4000} 300 ['{job.job}']\n"
    assert f"has job {job.job} of this request: it is not sent again" in done.stderr
    counts = Run.open(run.root).status().stages["items"]
    assert (counts.done, counts.duplicates) == (41, 0)
    assert len(trace.read_text().split()) <= 41  # the call of the killed worker began twice
    lab.wait_for(job.job, "COMPLETED")

    again = subprocess.run(argv, cwd=cwd, env=lab.env, check=True, capture_output=True, text=True)

    assert again.stdout == f"{sum(range(40)) + 4000} 300 []\n"
    assert [one.job for one in read_jobs(run.paths)] == [job.job]


FITS = """
import os
import time

import joblib
import hpc_toolkit.joblib


def fit(number):
    with open("trace", "a", buffering=1) as file:
        file.write(f"{number}\\n")
    time.sleep(0.3)
    return number, os.environ["SLURM_JOB_ID"]


if __name__ == "__main__":
    slurm = {"cluster": "lab", "nodes": 2, "ntasks_per_node": 1, "time": "10min", "mem": "1G"}
    with joblib.parallel_config(backend="hpctk", n_jobs=4, run="runs/fits", slurm=slurm):
        found = joblib.Parallel(batch_size=1)(joblib.delayed(fit)(n) for n in range(16))
    print(*(number for number, _ in found), len({job for _, job in found}))
"""


def test_a_killed_script_of_joblib_finds_its_calls_and_its_job(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    pytest.importorskip("joblib")
    (tmp_path / "fits.py").write_text(FITS)

    script = start(lab, tmp_path, "fits.py", err=subprocess.PIPE)
    results = tmp_path / "runs" / "fits"
    wait_until((results / "run.json").exists, "the run")
    wait_until(lambda: len(Run.open(results).results(partial=True)) >= 5, "results")
    script.kill()
    script.communicate()

    again = start(lab, tmp_path, "fits.py", err=subprocess.PIPE)
    out, err = again.communicate()

    assert again.returncode == 0, err
    assert out.split() == [*map(str, range(16)), "1"]
    # The second script submits no second job, and makes no finished call again.
    assert len((tmp_path / "trace").read_text().split()) == 16


SWEPT = """
import os
import time

import hydra


@hydra.main(version_base=None, config_path=None)
def main(cfg):
    with open("trace", "a", buffering=1) as file:
        file.write(f"{cfg.number}\\n")
    while len(open("trace").readlines()) > 8 and not os.path.exists("go"):
        time.sleep(0.1)
    return os.environ["SLURM_JOB_ID"]


if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_a_worker_and_a_job_of_a_sweep_are_killed(lab: LabUnderTest, tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="needs hydra-core")
    (tmp_path / "train.py").write_text(SWEPT)
    options = {"cluster": "lab", "nodes": 2, "ntasks_per_node": 1, "time": "10min", "mem": "1G"}
    line = ["-m", "hydra/launcher=hpctk", "+number=range(16)"]
    line += [f"+hydra.launcher.slurm.{name}={value}" for name, value in options.items()]

    def swept(*words: str) -> Script:
        return start(lab, tmp_path, "train.py", *line, *words, err=subprocess.STDOUT)

    def done(least: int) -> list[Run]:
        found = [Run.open(one.parent) for one in tmp_path.glob("multirun/*/*/.hpctk/run.json")]
        return [run for run in found if len(run.results(partial=True)) >= least]

    lab.configure(KillWait=2)  # its workers hold items when the job is cancelled
    submitted = swept("hydra.launcher.wait=false")
    out, _ = submitted.communicate()
    assert (submitted.returncode, "waits for the results" in out) == (0, True), out
    script = swept()
    assert script.stdout is not None
    assert any("is in the queue" in text for text in script.stdout)
    (run,) = wait_until(lambda: done(2), "results")
    os.kill(workers_of(run)[0].pid, signal.SIGKILL)
    wait_until(lambda: done(6), "more results")
    (job,) = lab.run("squeue", "-h", "-o", "%i").stdout.split()
    lab.run("scancel", job)
    script.kill()
    script.communicate()
    lab.wait_for(job, "CANCELLED")
    (tmp_path / "go").touch()

    again = swept()
    out, _ = again.communicate()

    assert again.returncode == 0, out
    rows = Run.open(run.root).results()
    assert [row["item"]["args"] for row in rows] == [[f"+number={n}"] for n in range(16)]
    jobs = sorted({row["value"] for row in rows})
    assert len(jobs) == 2
    repeated = len((tmp_path / "trace").read_text().split()) - 16
    assert repeated <= 3  # the jobs that ran when the worker and the Slurm job were killed
    # The job ends by itself: the script asks its workers to exit at the end of the sweep.
    lab.wait_for(jobs[1], "COMPLETED")
    MEASURED.append(f"a sweep of 16 jobs: Slurm jobs {jobs}, {repeated} began twice")
