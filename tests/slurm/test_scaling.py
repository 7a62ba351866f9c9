"""``scaling run --slurm`` on a real Slurm: ranks of one and of two nodes, measured by jobs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.slurm.reallab import LabUnderTest

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TRAIN = """
import sys, time
import torch.distributed as dist
from hpc_toolkit.training.distributed import process_group
from hpc_toolkit.training.scaling.recorder import Recorder

with process_group() as info:
    recorder = Recorder(batch_global=8, warmup=1)
    for step in range(4):
        time.sleep(float(sys.argv[1]) / info.world_size)
        if info.world_size > 1:
            dist.barrier()
        recorder.step(loss=1.0)
    recorder.finish()
"""


def test_a_training_is_measured_by_jobs_and_compared(lab: LabUnderTest, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    request = ("--cluster", "lab", "--mem", "1G", "--time", "5", "--cpus-per-task", "1")
    words = ("run", "-o", "s", "--slurm", "--world-sizes", "1,2", "--ranks-per-node", "1")
    own = ("--repeats", "1", "--", "train.py", "0.04")

    argv = (sys.executable, "-m", "hpc_toolkit", "scaling")
    jobs = lab.run(*argv, *words, *request, "--sbatch=hold", *own, cwd=tmp_path).stdout.split()
    twice = lab.run(*argv, *words, *request, *own, cwd=tmp_path, check=False)
    for job in jobs:
        lab.scontrol("release", job)
    ended = [lab.wait_for(job, "COMPLETED") for job in jobs]
    page = lab.run(*argv, "analyze", "s", cwd=tmp_path).stdout
    again = lab.run(*argv, *words, "--resume", *request, *own, cwd=tmp_path)

    assert twice.returncode == 1
    assert f"it has jobs in the queue: {jobs[0]} (PENDING, world size 1)" in twice.stderr
    assert len(ended) == 2
    assert "render train-multi-node" in next((tmp_path / "s/jobs").glob("*.sbatch")).read_text()
    found = [
        json.loads(line)
        for path in (tmp_path / "s/records").iterdir()
        for line in path.read_text().splitlines()
    ]
    assert sorted((one["world_size"], one["nodes"]) for one in found) == [(1, 1), (2, 2)]
    assert {one["machine"]["cluster"] for one in found} == {"lab"}
    assert {one["machine"]["job"] for one in found} == set(jobs)
    assert "## train.py" in page
    assert "| world size | samples/s |" in page
    assert again.stdout == ""
