"""A sweep of Hydra whose workers run in jobs of a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import MEASURED, wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
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


def test_a_worker_and_a_job_of_a_sweep_are_killed(lab: LabUnderTest, tmp_path: Path) -> None:
    pytest.importorskip("hydra", reason="needs hydra-core")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = {"cluster": "lab", "nodes": 2, "ntasks_per_node": 1, "time": "10min", "mem": "1G"}
    line = ["-m", "hydra/launcher=hpctk", "+number=range(16)"]
    line += [f"+hydra.launcher.slurm.{name}={value}" for name, value in options.items()]

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "train.py", *line, *words],
            cwd=tmp_path,
            env={**lab.env, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def done(least: int) -> list[Run]:
        found = [Run.open(one.parent) for one in tmp_path.glob("multirun/*/*/.hpctk/run.json")]
        return [run for run in found if len(run.results(partial=True)) >= least]

    submitted = start("hydra.launcher.wait=false")
    out, _ = submitted.communicate()
    assert (submitted.returncode, "waits for the results" in out) == (0, True), out
    script = start()
    assert script.stdout is not None
    assert any("is in the queue" in text for text in script.stdout)
    (run,) = wait_until(lambda: done(2), "results")
    workers = [one for path in run.paths.workers.glob("*.json") if (one := read_presence(path))]
    os.kill(workers[0].pid, signal.SIGKILL)
    wait_until(lambda: done(6), "more results")
    (job,) = lab.run("squeue", "-h", "-o", "%i").stdout.split()
    lab.run("scancel", job)
    script.kill()
    script.communicate()
    lab.wait_for(job, "CANCELLED")
    (tmp_path / "go").touch()

    again = start()
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
