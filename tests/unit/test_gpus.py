"""Whose GPUs: each rank of a node its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.system.gpus import rank_environment, share_of_gpus


def step(local: int, *, node: int = 0, tasks: str = "4(x8)", **changes: str) -> dict[str, str]:
    return {
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **changes,
    }


@pytest.mark.parametrize(
    ("gpus", "ranks", "shares"),
    [
        ("0 1 2 3", 4, ["0", "1", "2", "3"]),
        ("0 1 2 3", 2, ["0 1", "2 3"]),
        ("0 1 2 3", 1, ["0 1 2 3"]),
        ("0 1 2", 2, ["0", "1"]),
        ("0 1", 4, ["0", "1", "0", "1"]),
        ("GPU-a GPU-b", 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_ranks_of_a_node_share_its_gpus_evenly(gpus: str, ranks: int, shares: list[str]) -> None:
    found = [share_of_gpus(gpus.split(), rank, ranks) for rank in range(ranks)]

    assert [" ".join(share) for share in found] == shares


@given(st.integers(1, 16), st.integers(1, 32))
def test_every_rank_has_a_gpu_and_none_is_shared_without_need(gpus: int, ranks: int) -> None:
    names = [str(number) for number in range(gpus)]

    shares = [share_of_gpus(names, rank, ranks) for rank in range(ranks)]

    assert all(shares)
    taken = [gpu for share in shares for gpu in share]
    assert max(taken.count(gpu) for gpu in taken) == -(-ranks // gpus)


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
MIG = "MIG-GPU-8f6d1b0e-1b4f-5d2a-9a51-0f6d3c1e7c11/1/0,MIG-41f1b0d2-5e7a-5c3b-8f0a-2d9c6b7a4e10"
"""Devices of MIG, named as older and as newer drivers do."""
AMD = {"ROCR_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("environ", "share"),
    [
        (step(2, CUDA_VISIBLE_DEVICES="4,5,6,7"), {"CUDA_VISIBLE_DEVICES": "6"}),
        # The ranks of the own node are two.
        ({**step(1, node=2, tasks="4(x2),2"), **FOUR}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (step(1, CUDA_VISIBLE_DEVICES=MIG), {"CUDA_VISIBLE_DEVICES": MIG.partition(",")[2]}),
        ({**step(1), **AMD}, {"ROCR_VISIBLE_DEVICES": "1"}),
        ({**step(1), **AMD, **FOUR}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_rank_of_a_step_takes_its_own_of_the_visible_gpus(
    environ: dict[str, str], share: dict[str, str]
) -> None:
    assert rank_environment(environ) == share


@pytest.mark.parametrize(
    "environ",
    [
        {"CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        step(0, CUDA_VISIBLE_DEVICES="3"),
        step(0, tasks="2", CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="4"),
        step(0, tasks="1(x8)", CUDA_VISIBLE_DEVICES="0,1,2,3"),
        step(0, CUDA_VISIBLE_DEVICES=""),
        step(0),
        step(0, node=9, CUDA_VISIBLE_DEVICES="0,1"),
        step(0, tasks="many", CUDA_VISIBLE_DEVICES="0,1"),
    ],
)
def test_nothing_changes_where_there_is_nothing_to_share(environ: dict[str, str]) -> None:
    assert rank_environment(environ) == {}
