"""Who a process is, as Slurm's and torchrun's variables say."""

from __future__ import annotations

import pytest

from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.system.ranks import RankInfo

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NAME": "work-queue",
    "SLURM_CLUSTER_NAME": "site",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
}


def test_a_rank_of_a_step_is_told_by_slurm() -> None:
    assert RankInfo.from_environ(STEP) == RankInfo(
        rank=5,
        local_rank=1,
        world_size=8,
        job_id="17",
        job_name="work-queue",
        cluster="site",
        in_step=True,
    )


@pytest.mark.parametrize("letter", ["x", "\u00e4", "\N{ROCKET}"])
def test_a_workers_file_keeps_its_length_whatever_its_job_is_called(letter: str) -> None:
    rank = RankInfo.from_environ({**STEP, "SLURM_JOB_NAME": 500 * letter})
    presence = Presence(
        worker="gpu-node-0123-1234567-abcdef",
        host="gpu-node-0123.cluster.university.example.org",
        boot=36 * "0",
        pid=1234567,
        ticks=123456789,
        rank=4095,
        job="12345678_9999",
        cluster="killarney",
        job_name=rank.job_name,
        started=1795263151.901,
        at=1795263151.901,
    )

    assert rank.job_name.startswith(30 * letter)
    assert len(presence.encode()) == 1024


def test_a_restarted_job_counts_its_restarts_and_an_element_of_an_array_has_its_own_name() -> None:
    """The last element's SLURM_JOB_ID is that of the array, whose state is another thing."""
    element = {"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}

    found = RankInfo.from_environ({**STEP, **element})

    assert (found.job_id, found.restart) == ("17_3", 2)
