"""Which rank a process is, by what its launcher, srun or nobody says."""

from __future__ import annotations

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.distributed import DistributedInfo

LAUNCHED = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# An agent that srun started is one task of a step, and its ranks have that task's variables.
AGENTS_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}


def test_a_launchers_variables_name_rank_and_node_and_are_believed_before_slurm() -> None:
    info = DistributedInfo.from_environ({**AGENTS_TASK, **LAUNCHED, "SLURM_RESTART_COUNT": "3"})

    assert (info.rank, info.local_rank, info.world_size) == (5, 1, 8)
    assert (info.local_world_size, info.node_rank, info.restart, info.requeue) == (4, 1, 2, 3)
    assert (info.launched, info.is_main) == (True, False)


def test_a_task_of_srun_is_a_rank() -> None:
    info = DistributedInfo.from_environ({**AGENTS_TASK, "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})

    assert (info.rank, info.local_rank, info.world_size, info.launched) == (1, 1, 2, True)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script outside of any step
        {**AGENTS_TASK, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
)
def test_a_process_without_other_ranks_is_alone(environ: dict[str, str]) -> None:
    info = DistributedInfo.from_environ(environ)

    assert (info.rank, info.world_size) == (0, 1)
    assert not info.launched
    assert info.is_main


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RANK": "8"}, "rank 8 is not one of 8"),
        ({"RANK": "first"}, "RANK is 'first'"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_a_rank_that_cannot_be_is_named(changed: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DistributedInfo.from_environ({**LAUNCHED, **changed})


def test_half_of_a_launchers_variables_is_an_error() -> None:
    with pytest.raises(ConfigError, match="RANK is not set") as caught:
        DistributedInfo.from_environ({"WORLD_SIZE": "2"})

    assert "hpctk launch" in caught.value.hint
