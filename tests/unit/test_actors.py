"""Ranks as Ray actors, without Ray: what is asked of it, who is replaced, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.engines.ray import engine as engine_module
from hpc_toolkit.engines.ray import node
from hpc_toolkit.engines.ray.rank import Order, RankActor
from hpc_toolkit.engines.ray.settings import RaySettings, check_room, demand_of, room
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RenderError
from hpc_toolkit.slurm.clusters.facts import load_cluster
from hpc_toolkit.slurm.render.script import render_script
from hpc_toolkit.slurm.render.spec import ScriptSpec

if TYPE_CHECKING:
    from pathlib import Path


# --- what is asked ---


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cpus_per_worker": -1.0}, "--cpus-per-worker: -1 is not a valid amount"),
        ({"gpus_per_worker": float("nan")}, "--gpus-per-worker: nan is not a valid amount"),
        ({"gpus_per_worker": 1.5}, "whole GPUs or a fraction of one, not 1.5"),
    ],
)
def test_settings_that_ray_cannot_give_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RaySettings(**values)


@pytest.mark.parametrize(
    ("address", "environ", "found"),
    [
        ("auto", {}, ""),
        ("auto", {"RAY_ADDRESS": "n1:6379"}, "n1:6379"),
        ("auto", {"RAY_ADDRESS": "local"}, ""),
        ("local", {"RAY_ADDRESS": "n1:6379"}, ""),
        ("10.0.0.1:20001", {}, "10.0.0.1:20001"),
    ],
)
def test_an_address_is_that_of_a_cluster_or_a_local_one(
    address: str, environ: dict[str, str], found: str
) -> None:
    assert RaySettings(address=address).resolve(environ) == found


@pytest.mark.parametrize("address", ["n1", ":6379", "n1:0", "n1:99999", "ray://n1:10001", "n1:x"])
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT, not"):
        RaySettings(address=address).resolve({})


def test_a_local_cluster_for_each_task_of_a_step_is_refused() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8"}

    with pytest.raises(ConfigError, match="each of the 8 tasks"):
        RaySettings().resolve(step)
    assert RaySettings().resolve({**step, "SLURM_STEP_NUM_TASKS": "1"}) == ""
    assert RaySettings().resolve({**step, "RAY_ADDRESS": "n1:6379"}) == "n1:6379"
    # The interactive step in which salloc runs a shell.
    assert RaySettings().resolve({**step, "SLURM_STEP_ID": "4294967290"}) == ""


def test_an_address_where_nothing_listens_is_refused_without_asking_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "ray", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

    with (
        pytest.raises(HpcToolkitError, match=f"no Ray cluster answers at {address}: ") as caught,
        engine_module.joined(RaySettings(address=address)),
    ):
        pass

    assert "port" in caught.value.hint


# --- shares and room ---


def test_room_counts_workers_on_nodes_and_not_sums() -> None:
    nodes = [{"CPU": 3.0, "GPU": 1.0}, {"CPU": 3.0}]

    assert room(nodes, {"CPU": 2.0}) == 2
    assert room(nodes, {"CPU": 1.0, "GPU": 0.5}) == 2
    assert room(nodes, {"GPU": 2.0}) == 0
    assert room([{"GPU": 2.0}], {"GPU": 0.6}) == 2  # Ray takes a part of one GPU, never of two
    assert room(nodes, {"CPU": 0.0}) > 1000


def test_a_worker_has_one_cpu_and_where_there_are_gpus_one_of_them() -> None:
    nodes = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}]
    asked = RaySettings(cpus_per_worker=3, gpus_per_worker=0.5, memory_per_worker=2**30)

    assert demand_of(RaySettings(), nodes) == {"CPU": 1.0, "GPU": 1.0, "memory": 0.0}
    assert demand_of(RaySettings(), nodes[:1])["GPU"] == 0.0
    assert demand_of(asked, nodes) == {"CPU": 3, "GPU": 0.5, "memory": 2.0**30}


def test_workers_for_whom_there_is_no_room_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"CPU": 4.0}]

    check_room(nodes, {"CPU": 2.0}, 3)
    with pytest.raises(ConfigError, match="no node of the Ray cluster has 1 GPU"):
        check_room(nodes, {"CPU": 0.0, "GPU": 1.0}, 3)

    assert "room for 2 of 3 workers (2 CPU each)" in capsys.readouterr().err


# --- one rank ---


def order(root: str = "/run", **values: Any) -> Order:
    standard: dict[str, Any] = {"cwd": "/", "rank": 3, "world_size": 8, "gpus": 0, "options": {}}
    return Order(root=root, **{"memory_bytes": 0, **standard, **values})


def test_a_ranks_place_is_its_own_and_not_that_of_the_task_that_started_ray() -> None:
    node_environ = {
        "SLURM_JOB_ID": "17",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURMD_NODENAME": "n2",
        "CUDA_VISIBLE_DEVICES": "1",
    }

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


def test_a_node_that_lacks_the_run_says_so() -> None:
    actor = RankActor(order("/no/such/run").to_json())

    report = actor.run()

    assert report["code"] == 1
    assert "cannot see /no/such/run" in report["error"]["message"]


def test_a_rank_that_was_told_to_leave_before_its_start_does_not_start(tmp_path: Path) -> None:
    actor = RankActor(order(str(tmp_path)).to_json())

    actor.tell(signal.SIGTERM)

    assert actor.run() == {"code": 75, "error": None, "finished": 0}


# --- the driver ---


# --- a job ---


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the template ray needs a program"),
        (
            {"command": ("train",), "ntasks_per_node": 4},
            "--ntasks-per-node: the template ray starts one task",
        ),
        (
            {"command": ("train",), "container": "/image.sif"},
            "--container: the template ray starts one task",
        ),
        ({"command": ("train",), "run": "runs/a"}, "--run: not used by the template ray"),
    ],
)
def test_what_the_script_of_a_ray_would_leave_out_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(RenderError, match=message):
        render_script(ScriptSpec(python="/opt/python", **fields), load_cluster("generic"), "ray")


def test_ray_is_told_what_slurm_gave_the_job_of_the_node() -> None:
    environ = {"SLURM_CPUS_ON_NODE": "16", "SLURM_GPUS_ON_NODE": "2", "SLURM_MEM_PER_CPU": "64"}

    found = dict(option.split("=") for option in node.resources(environ))

    assert (found["--num-cpus"], found["--num-gpus"]) == ("16", "2")
    assert int(found["--memory"]) + int(found["--object-store-memory"]) == 2**30
    assert node.resources({})[0] == f"--num-cpus={len(os.sched_getaffinity(0))}"


def test_the_command_gets_what_is_missing_and_keeps_what_was_given() -> None:
    words = ["ray", "symmetric-run", "--address", "n1:1", "--num-cpus=3", "--", "train", "--", "-x"]

    environ = {"SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "2"}
    found = node.full_command(words, "/scratch/job", environ)

    assert found == [
        *("ray", "symmetric-run", "--address", "n1:1", "--num-cpus=3"),
        *("--num-gpus=2", "--temp-dir=/scratch/job/r", "--"),
        *(sys.executable, "-Pm", "hpc_toolkit.engines.ray.node", "--program", "train", "--", "-x"),
    ]
    with pytest.raises(ConfigError, match="no program"):
        node.full_command(["ray", "symmetric-run", "--"], "/scratch/job", {})


def test_the_ray_of_a_job_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tmp_path / "it's real"
    real.mkdir()
    python = real / "python"
    python.write_text('#!/bin/sh\nshift 3\necho "real $*"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))

    programs = node._own_ray(tmp_path)

    def says(*words: str) -> str:
        with os.popen(f"'{programs}/ray' {' '.join(words)}") as said:
            return said.read()

    assert says("start", "--head", "--x") == "real start --head --x --include-dashboard=false\n"
    assert says("start", "--address", "a:1") == "real start --address a:1\n"
    assert says("stop") == ""
