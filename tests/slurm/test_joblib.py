"""A search of scikit-learn whose fits are made by workers in a job of a real Slurm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_toolkit.run import Run
from tests.integration.realrun import REPOSITORY
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until

pytestmark = pytest.mark.slow

SCRIPT = """
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


def test_a_killed_script_finds_its_calls_and_its_job(lab: LabUnderTest, tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    (tmp_path / "fits.py").write_text(SCRIPT)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "fits.py"],
            cwd=tmp_path,
            env={**lab.env, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    script = start()
    results = tmp_path / "runs" / "fits"
    wait_until((results / "run.json").exists, "the run")
    wait_until(lambda: len(Run.open(results).results(partial=True)) >= 5, "results")
    script.kill()
    script.communicate()

    again = start()
    out, err = again.communicate()

    assert again.returncode == 0, err
    assert out.split() == [*map(str, range(16)), "1"]
    # The second script submits no second job, and makes no finished call again.
    assert len((tmp_path / "trace").read_text().split()) == 16
