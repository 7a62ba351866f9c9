"""Nodes are given back by a real Slurm, also after the job has lost one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.lab.settings import LabSettings
from tests.slurm.reallab import LabUnderTest
from tests.slurm.rehearsal import wait_until
from tests.toyrun import ToyRun

# The ranks of a node leave when its file appears; the step goes on, as in a job of a work queue.
JOB = """#!/bin/bash
#SBATCH --nodes=4 --no-kill
srun --no-kill --kill-on-bad-exit=0 --wait=0 \\
  bash -c 'touch "$0/$(hostname)"; until test -e "$0/$(hostname).left"; do sleep 0.1; done' "$2" &
exec "$1" -c '
import os
import sys
from pathlib import Path
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.batch.work import shrink_job
from hpc_toolkit.slurm.controller import host_names
from hpc_toolkit.system.ranks import RankInfo

nodes = host_names(os.environ["SLURM_JOB_NODELIST"])
for nodes in shrink_job(RunPaths(Path(sys.argv[1])), RankInfo.from_environ(), nodes, every_s=0.2):
    print("gave back", *nodes, flush=True)
' "$3"
"""


@pytest.fixture
def shrinking(lab: LabUnderTest, lab_directory: Path) -> Iterator[LabUnderTest]:
    """A lab that shrinks a job several times: without slurmdbd, Slurm 22.05 does so only once."""
    if " 22." not in lab.run("sinfo", "--version").stdout:
        yield lab
        return
    with LabUnderTest(lab_directory / "shrinking", LabSettings(4, 0, accounting=True)) as own:
        yield own


@pytest.mark.newslurm
def test_idle_nodes_are_given_back_after_another_node_is_lost(
    shrinking: LabUnderTest, toy: ToyRun, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(JOB)
    job = shrinking.sbatch(
        *("-o", tmp_path / "log", tmp_path / "job.sh"),
        *(sys.executable, tmp_path, toy.root),
        cwd=tmp_path,
    )

    def nodes() -> str:
        return shrinking.run(
            "squeue", "-h", f"--jobs={job}", "--states=all", "-o", "%N"
        ).stdout.strip()

    wait_until(lambda: all((tmp_path / f"n{n}").exists() for n in range(1, 5)), "four ranks")
    ranks = {f"n{n}": toy.worker(f"on-n{n}", host=f"n{n}", job=job) for n in range(1, 5)}
    shrinking.lab.crash("n2")
    wait_until(lambda: nodes() == "n[1,3-4]", lambda: f"the loss of n2; the job has {nodes()}")

    for node, left in (("n3", "n[1,4]"), ("n4", "n1")):
        (tmp_path / f"{node}.left").touch()
        ranks[node].finish()
        wait_until(
            lambda left=left: nodes() == left,  # type: ignore[misc] # of this turn
            lambda: f"fewer nodes than {nodes()}; log:\n{(tmp_path / 'log').read_text()}",
            limit_s=30,
        )

    wait_until(lambda: shrinking.records(job)[0].ended, "the end of the job")
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "gave back" in line]
    assert said == [f"gave back {node}" for node in ("n3", "n4")]
