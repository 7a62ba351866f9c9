"""``scaling run --slurm`` on a real Slurm: ranks of several nodes, measured by one job."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_world_size_of_two_nodes_is_measured_by_one_job(
    lab: LabUnderTest, tmp_path: Path
) -> None:
    small = ("--model", "decoder-1x32", "--seq-length", "16", "--max-steps", "3", "--repeats", "1")
    request = ("--cluster", "lab", "--mem", "1G", "--time", "5", "--cpus-per-task", "1")
    words = ("scaling", "run", "-o", "s", "--slurm", "--world-sizes", "2", "--ranks-per-node", "1")

    argv = (sys.executable, "-m", "hpc_toolkit", *words, *small, *request)
    sent = lab.run(*argv, "--sbatch=hold", cwd=tmp_path)
    (job,) = sent.stdout.split()
    again = lab.run(*argv, cwd=tmp_path, check=False)
    lab.scontrol("release", job)
    record = lab.wait_for(job, "COMPLETED")

    assert again.returncode == 1
    assert f"it has jobs in the queue: {job} (PENDING, world size 2)" in again.stderr
    (script,) = (tmp_path / "s" / "jobs").glob("*.sbatch")
    assert " render train-multi-node " in script.read_text()
    line = (tmp_path / "s" / "records" / "world-2.jsonl").read_text()
    found = json.loads(line)
    assert (found["world_size"], found["nodes"]) == (2, 2), lab.output(record)
    assert (found["machine"]["cluster"], found["machine"]["job"]) == ("lab", job)
    assert found["communication"]["all_reduce_s"] > 0
    assert len(list((tmp_path / "s" / "monitor").iterdir())) == 2
