"""Ranks as Ray actors, without Ray: what is asked of it, who is replaced, how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_toolkit.engines.raydriver import RaySettings
from hpc_toolkit.engines.rayrank import Order, check_room, room
from hpc_toolkit.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpus_per_worker": -1.0}, "--cpus-per-worker: -1 is not a valid amount"),
        ({"gpus_per_worker": float("nan")}, "--gpus-per-worker: nan is not a valid amount"),
        ({"gpus_per_worker": 1.5}, "whole GPUs or a fraction of one, not 1.5"),
        *(
            ({"address": one}, "HOST:PORT, not")
            for one in ("n1", ":6379", "n1:0", "n1:99999", "ray://n1:10001", "n1:x")
        ),
        ({}, "RAY_ADDRESS is not set"),
    ],
)
def test_settings_that_ray_cannot_give_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings(**values).resolve({})
    assert RaySettings().resolve({"RAY_ADDRESS": "n1:6379"}) == "n1:6379"


def test_room_counts_workers_on_nodes_and_those_without_room_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 3.0}]

    assert room(nodes, {"CPU": 2.0}) == 2
    assert room(nodes, {"CPU": 1.0, "GPU": 0.5}) == 2
    assert room(nodes, {"GPU": 2.0}) == 0
    assert room([{"GPU": 2.0}], {"GPU": 0.6}) == 2  # Ray takes a part of one GPU, never of two
    assert room(nodes, {"CPU": 0.0}) > 1000
    check_room(nodes, {"CPU": 2.0}, 3)
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 1 GPU"):
        check_room(nodes[1:], {"CPU": 0.0, "GPU": 1.0}, 3)
    assert "room for 2 of 3 workers (2 CPU each)" in capsys.readouterr().err


def test_a_ranks_place_is_its_own_and_not_that_of_the_task_that_started_ray() -> None:
    node_environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURMD_NODENAME": "n2",
        "CUDA_VISIBLE_DEVICES": "1",
    }

    def order(**values: Any) -> Order:
        standard = {"cwd": "/", "rank": 3, "world_size": 8, "gpus": 0, "options": {}}
        return Order(root="/run", **{"memory_bytes": 0, **standard, **values})

    found = order(gpus=1.0).environment(node_environ)

    assert found == {
        "SLURM_JOB_ID": "17",
        "SLURMD_NODENAME": "n2",
        "CUDA_VISIBLE_DEVICES": "1",
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
    }
    # Ray leaves the GPUs of its node visible to an actor without any.
    assert order().environment(node_environ)["CUDA_VISIBLE_DEVICES"] == ""
    assert "1048576" in order(memory_bytes=2**20).environment({}).values()
