"""Workers in jobs of other schedulers: real processes with the variables that a job has."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from hpc_toolkit.queue.presence import read_presence
from tests.integration.realrun import Hpctk

JOBS = {
    "pbs:12": {"PBS_JOBID": "12.site", "PBS_JOBNAME": "squares"},
    "lsf:12[3]": {"LSB_JOBID": "12", "LSB_JOBINDEX": "3", "LSB_JOBNAME": "squares"},
    "sge:12": {"JOB_ID": "12", "SGE_TASK_ID": "undefined", "JOB_NAME": "squares"},
    "flux:f12": {"FLUX_JOB_ID": "f12"},
    "17": {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n12"},
}


def rank(job: str, number: int, size: int) -> dict[str, str]:
    """The variables of one process that mpiexec, flux run, or srun has started."""
    if job.startswith("flux"):
        place = {"FLUX_TASK_RANK": number, "FLUX_TASK_LOCAL_ID": number, "FLUX_JOB_SIZE": size}
    elif job == "17":
        place = {"SLURM_PROCID": number, "SLURM_LOCALID": number, "SLURM_NTASKS": size}
    else:
        place = {"PMI_RANK": number, "MPI_LOCALRANKID": number, "PMI_SIZE": size}
    return JOBS[job] | {name: str(value) for name, value in place.items()}


@pytest.mark.parametrize("job", JOBS)
def test_each_process_of_a_parallel_start_is_one_worker_of_its_job(hpctk: Hpctk, job: str) -> None:
    hpctk("init", "run", "--command", "sleep 0.1", "--count", "12")

    ended = [hpctk.start("work", "run", env=rank(job, number, 3)) for number in range(3)]

    assert [one.ended().code for one in ended] == [0, 0, 0]
    found = [read_presence(path) for path in (hpctk.cwd / "run/workers").glob("*.json")]
    assert sorted(one.rank for one in found if one) == [0, 1, 2]
    assert {one.job for one in found if one} == {job}
    assert job != "17" or {one.host for one in found if one} == {"n12"}
    assert "12 of 12" in hpctk("status", "run").out


def with_flux(directory: Path, script: str) -> dict[str, str]:
    """A PATH with a program flux."""
    flux = directory / "bin/flux"
    flux.parent.mkdir()
    flux.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    flux.chmod(0o755)
    return {"PATH": f"{flux.parent}:{os.environ['PATH']}"}


def test_a_worker_leaves_before_the_end_that_the_scheduler_tells(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    """Half a minute before, and with the code that says that items are left."""
    hpctk("init", "run", "--command", "sleep 0.4", "--count", "200")

    env = {**rank("flux:f12", 0, 1), **with_flux(tmp_path, "echo 36")}
    ended = hpctk.start("work", "run", env=env).ended()

    assert ended.code == 75, ended.err
    assert 0 < hpctk("status", "run", "--json").json["stages"]["items"]["done"] < 200


# What ranks of torch meet by; test_launch.py trains with it.
RANK = """
import os
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "HPCTK_DEADLINE"
print(*map(os.environ.get, names), flush=True)
"""


@pytest.mark.torch
def test_ranks_of_flux_have_one_place_to_meet_and_know_the_end_of_the_job(
    hpctk: Hpctk, tmp_path: Path
) -> None:
    (hpctk.cwd / "train.py").write_text(RANK, encoding="utf-8")
    job = {"FLUX_JOB_NNODES": "2", **with_flux(tmp_path, "[ $1 = job ] && echo 3600")}
    words = ("launch", "--run-dir", "R", "--nproc-per-node", "1", "train.py")

    nodes = [hpctk.start(*words, env={**rank("flux:f12", number, 2), **job}) for number in range(2)]

    meetings = set()
    for number, ended in enumerate(one.ended() for one in nodes):
        assert ended.code == 0, ended.err
        found = re.search(rf"\[rank {number}\] {number} 2 0 (\S+ \d+) (\d+)\n", ended.out)
        assert found is not None, ended.out
        meetings.add(found[1])
        assert abs(int(found[2]) - time.time() - 3600) < 120
        assert ("2 ranks, 0 restarts" in ended.err) is (number == 0)
    assert len(meetings) == 1
