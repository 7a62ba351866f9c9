"""What each worker of a machine, or rank of a node, gets; machines are files of the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.binding import (
    Machine,
    Place,
    Shares,
    bind_rank,
    own_place,
    place_workers,
    read_machine,
)
from hpc_toolkit.system.gpus import rank_environment, share_of_gpus
from hpc_toolkit.system.quantities import format_cpus, parse_cpus

GIB = 1 << 30
MEMORY = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}


def machine(**changes: Any) -> Machine:
    """Two sockets of 8 CPUs and two GPUs each."""
    facts: dict[str, Any] = {"nodes": {0: tuple(range(8)), 1: tuple(range(8, 16))}}
    facts |= {"memory_bytes": 64 * GIB, "gpus": ("0", "1", "2", "3")}
    facts["gpu_nodes"] = {"0": 1, "1": 1, "2": 0, "3": 0}
    return Machine(**{**facts, **changes})


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpus", "nodes"),
    [
        (3, [(0,), (1,), (0,), (1,)]),
        (5, [(0,), (1,), (0, 1)]),  # no node has enough left
    ],
)
def test_workers_have_cpus_of_their_own_and_of_one_node_each_if_it_has_enough(
    cpus: int, nodes: list[tuple[int, ...]]
) -> None:
    places = place_workers(machine(), Shares(cpus=cpus), len(nodes))

    assert [len(place.cpus) for place in places] == [cpus] * len(nodes)
    assert len({cpu for place in places for cpu in place.cpus}) == cpus * len(nodes)
    assert [place.nodes for place in places] == nodes


@pytest.mark.parametrize(
    ("workers", "cpus", "gpus"),
    [
        (4, [4, 4, 4, 4], [["0"], ["1"], ["2"], ["3"]]),
        (3, [6, 5, 5], [["0", "1"], ["2"], ["3"]]),
        (13, [4, *[1] * 12], [["0", "1", "2", "3"], *[[]] * 12]),
        (17, [0] * 17, [["0", "1", "2", "3"], *[[]] * 16]),  # which share the CPUs
    ],
)
def test_all_of_it_is_divided_and_the_first_worker_gets_the_remainder(
    workers: int, cpus: list[int], gpus: list[list[str]]
) -> None:
    places = place_workers(machine(), Shares(divided=True), workers)

    assert [len(place.cpus) for place in places] == cpus
    assert [list(place.gpus or ()) for place in places] == gpus
    used = [cpu for place in places for cpu in place.cpus]
    assert len(used) == len(set(used)) == (16 if workers < 17 else 0)
    assert place_workers(machine(gpus=()), Shares(divided=True), 2)[1].gpus is None


@pytest.mark.parametrize(
    ("cpus", "machine_has", "environ", "bound"),
    [
        (range(4), 8, {}, None),  # Slurm has bound it
        (range(4), 8, {"SLURM_CPUS_ON_NODE": "4"}, {2, 3}),
        (range(4), 8, {"SLURM_CPUS_ON_NODE": "4", "SLURM_CPU_BIND_TYPE": "mask_cpu:"}, None),
        (range(8), 8, {}, {4, 5, 6, 7}),
        (range(1), 1, {}, None),  # there is not one for each
    ],
)
def test_a_rank_takes_its_part_of_the_cpus_if_slurm_has_not_bound_it(
    cpus: range, machine_has: int, environ: Any, bound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cpus))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, given: made.append(set(given)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine_has)

    bind_rank({"SLURM_NODEID": "0", **environ})
    bind_rank({**step(1, tasks="2"), **environ})
    mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    bind_rank({"PBS_JOBID": "7", **mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **environ})

    assert made == ([] if bound is None else [bound] * 2)


def test_a_worker_is_near_its_gpu() -> None:
    places = place_workers(machine(), Shares(cpus=2, gpus=1), 4)

    nodes = {"0": 1, "1": 1, "2": 0, "3": 0}
    found = [(place.gpus, place.nodes) for place in places]
    assert found == [((gpu,), (node,)) for gpu, node in nodes.items()]


@pytest.mark.parametrize(
    ("gpus", "workers", "expected"),
    [
        (2.0, 2, ["0,1", "2,3"]),
        (0.5, 4, ["0", "0", "1", "1"]),
        (0.4, 3, ["0", "0", "1"]),
        (0.0, 2, ["", ""]),
    ],
)
def test_gpus_are_shared_out_in_order(gpus: float, workers: int, expected: list[str]) -> None:
    places = place_workers(machine(), Shares(gpus=gpus), workers)

    found = [place.environment({}) for place in places]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == expected
    assert Shares(gpus=gpus).workers_on(4) == {2.0: 2, 0.5: 8, 0.4: 8, 0.0: 1}[gpus]


@pytest.mark.parametrize(
    ("shares", "workers", "match", "hint"),
    [
        ({"cpus": 4}, 5, r"5 workers x .* 4 = 20 CPUs.*can use only 16", "--workers 4"),
        ({"cpus": 40}, 1, "can use only 16", "--cpus-per-worker 16"),
        ({"gpus": 0.5}, 9, "need 5 GPUs, but this process sees 4", "fewer workers"),
        ({"memory_bytes": 20 * GIB}, 4, "20.0 GiB exceed the available 64.0 GiB", "--workers 3"),
        ({"memory_bytes": 80 * GIB}, 1, "the available 64.0 GiB", "--memory-per-worker 65536M"),
    ],
)
def test_more_than_there_is_is_refused(
    shares: dict[str, Any], workers: int, match: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        place_workers(machine(), Shares(**shares), workers)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("shares", "match"),
    [
        ({"cpus": 0}, "--cpus-per-worker must be at least 1, got 0"),
        ({"gpus": 1.5}, "--gpus-per-worker must be 0, a fraction below 1 or whole, got 1.5"),
        ({"gpus": -1.0}, "got -1"),
        ({"gpus": float("nan")}, "got nan"),
        ({"memory_bytes": 1 << 20}, "--memory-per-worker must be at least 64.0 MiB, got 1.0 MiB"),
    ],
)
def test_a_share_that_is_none_is_refused(shares: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Shares(**shares)


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("", [])])
def test_lists_of_cpus_are_read_and_written_as_the_kernel_does(text: str, cpus: list[int]) -> None:
    assert parse_cpus(text) == cpus
    assert format_cpus(tuple(cpus)) == text.strip()


# A machine whose /proc and /sys are files of the test; its CPUs 0 to 7 may be used.


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("allowed")
def test_threads_of_a_core_are_neighbours_and_cpus_of_others_are_left_out(tmp_path: Path) -> None:
    cpus = "sys/devices/system/cpu"
    siblings = {
        f"{cpus}/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in range(8)
    }
    lists = ("0-1,4-5,16-19\n", "2-3,6-7\n", "\n")
    nodes = {f"sys/devices/system/node/node{n}/cpulist": one for n, one in enumerate(lists)}
    root = written(tmp_path, {**MEMORY, **nodes, **siblings})

    found = read_machine(root, {})

    assert found.nodes == {0: (0, 4, 1, 5), 1: (2, 6, 3, 7)}
    assert found.memory_bytes == 16 * GIB
    assert found.cpu_quota is None


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("files", "limits"),
    [
        (
            {
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/pod/container/memory.max": "max\n",
                "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            },
            (4 * GIB, 2.5),
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            (2 * GIB, 3.0),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_least_limit_of_the_control_groups_above_counts(
    files: dict[str, str], limits: tuple[int, float], tmp_path: Path
) -> None:
    found = read_machine(written(tmp_path, {**MEMORY, **files}), {})

    assert (found.memory_bytes, found.cpu_quota) == limits


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SLURM_MEM_PER_NODE": "1024"}, GIB),
        ({"SLURM_MEM_PER_CPU": "512"}, 4 * GIB),
        ({"SLURM_MEM_PER_CPU": "512", "SLURM_CPUS_ON_NODE": "16"}, 8 * GIB),
        ({"SLURM_MEM_PER_NODE": "0"}, 16 * GIB),
    ],
)
def test_what_slurm_granted_counts(environ: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert read_machine(written(tmp_path, MEMORY), environ).memory_bytes == expected


@pytest.mark.usefixtures("allowed")
def test_the_nodes_of_gpus_are_known_where_all_of_them_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ("0000:17:00.0", "0000:CA:00.0")
    known = {f"proc/driver/nvidia/gpus/{gpu}/information": "" for gpu in gpus}
    of = zip(gpus, ("1\n", "-1\n"), strict=True)
    nodes = {f"sys/bus/pci/devices/{gpu.lower()}/numa_node": text for gpu, text in of}
    root = written(tmp_path, {**MEMORY, **known, **nodes})
    for named, expected in (("0,1", {"0": 1}), ("0", {}), ("GPU-a,GPU-b", {})):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert read_machine(root, {}).gpu_nodes == expected


def test_what_a_process_has_is_read_from_the_kernel_and_its_environment() -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    environ = {"CUDA_VISIBLE_DEVICES": "1,GPU-7", "HPCTK_MEMORY_PER_WORKER": str(2**30)}

    assert own_place(environ) == Place(cpus=cpus, gpus=("1", "GPU-7"), memory_bytes=2**30)
    assert own_place({}) == Place(cpus=cpus)
    assert own_place({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    for place in (own_place(environ), Place(gpus=()), Place()):
        assert Place.from_record(json.loads(json.dumps(place.to_record()))) == place


def step(local: int, *, node: int = 0, tasks: str = "4(x8)", **changes: str) -> dict[str, str]:
    own = {"SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    return {**own, "SLURM_STEP_TASKS_PER_NODE": tasks, **changes}


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
        # The last of three GPUs is left over, or four ranks share two.
        (step(1, tasks="2", CUDA_VISIBLE_DEVICES="0,1,2"), {"CUDA_VISIBLE_DEVICES": "1"}),
        (step(3, tasks="4", CUDA_VISIBLE_DEVICES="0,1"), {"CUDA_VISIBLE_DEVICES": "1"}),
        # Nothing changes where there is nothing to share.
        (FOUR, {}),
        (step(0, CUDA_VISIBLE_DEVICES="3"), {}),
        (step(0, tasks="2", CUDA_VISIBLE_DEVICES="0,1", SLURM_GPUS_ON_NODE="4"), {}),
        ({**step(0, tasks="1(x8)"), **FOUR}, {}),
        (step(0, CUDA_VISIBLE_DEVICES=""), {}),
        (step(0), {}),
        (step(0, node=9, CUDA_VISIBLE_DEVICES="0,1"), {}),
        (step(0, tasks="many", CUDA_VISIBLE_DEVICES="0,1"), {}),
    ],
)
def test_a_rank_of_a_step_takes_its_own_of_the_visible_gpus(
    environ: dict[str, str], share: dict[str, str]
) -> None:
    assert rank_environment(environ) == share
