"""What each worker of a machine gets, on machines that are files of the test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.binding import Place, Shares, own_place, place_workers
from hpc_toolkit.system.machine import Machine, format_cpus, parse_cpus, read_machine

GIB = 1 << 30
MEMORY = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB\n"}


def machine(**changes: Any) -> Machine:
    """Two sockets of 8 CPUs and two GPUs each."""
    facts: dict[str, Any] = {
        "nodes": {0: tuple(range(8)), 1: tuple(range(8, 16))},
        "memory_bytes": 64 * GIB,
        "gpus": ("0", "1", "2", "3"),
        "gpu_nodes": {"0": 1, "1": 1, "2": 0, "3": 0},
    }
    return Machine(**{**facts, **changes})


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_workers_have_cpus_of_their_own_and_of_one_node_each() -> None:
    places = place_workers(machine(), Shares(cpus=3), 4)

    assert [len(place.cpus) for place in places] == [3] * 4
    assert len({cpu for place in places for cpu in place.cpus}) == 12
    assert [place.nodes for place in places] == [(0,), (1,), (0,), (1,)]


def test_a_worker_spans_nodes_only_where_none_has_enough_left() -> None:
    places = place_workers(machine(), Shares(cpus=5), 3)

    assert [place.nodes for place in places] == [(0,), (1,), (0, 1)]
    assert len({cpu for place in places for cpu in place.cpus}) == 15


def test_a_worker_is_near_its_gpu() -> None:
    places = place_workers(machine(), Shares(cpus=2, gpus=1), 4)

    assert [(place.gpus, place.nodes) for place in places] == [
        (("0",), (1,)),
        (("1",), (1,)),
        (("2",), (0,)),
        (("3",), (0,)),
    ]


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
        (
            {"cpus": 4},
            5,
            r"5 workers x --cpus-per-worker 4 = 20 CPUs.*can use only 16",
            "--workers 4",
        ),
        ({"cpus": 40}, 1, "can use only 16", "--cpus-per-worker 16"),
        ({"gpus": 0.5}, 9, "need 5 GPUs, but this process sees 4", "fewer workers"),
        ({"memory_bytes": 20 * GIB}, 4, "20.0 GiB exceed the available 64.0 GiB", "--workers 3"),
        (
            {"memory_bytes": 80 * GIB},
            1,
            "exceed the available 64.0 GiB",
            "--memory-per-worker 65536M",
        ),
    ],
)
def test_more_than_there_is_is_refused(
    shares: dict[str, Any], workers: int, match: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        place_workers(machine(), Shares(**shares), workers)
    assert hint in caught.value.hint


def test_a_quota_of_the_container_counts_beside_its_cpus() -> None:
    with pytest.raises(ConfigError, match=r"can use only 2\.5"):
        place_workers(machine(cpu_quota=2.5), Shares(cpus=1), 3)
    assert len(place_workers(machine(cpu_quota=3.0), Shares(cpus=1), 3)) == 3


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


class TestReading:
    """A machine whose /proc and /sys are files of the test; its CPUs 0 to 7 may be used."""

    @pytest.fixture(autouse=True)
    def _allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test_threads_of_a_core_are_neighbours_and_cpus_of_others_are_left_out(
        self, tmp_path: Path
    ) -> None:
        cpus = "sys/devices/system/cpu"
        siblings = {
            f"{cpus}/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
            for cpu in range(8)
        }
        nodes = {
            "sys/devices/system/node/node0/cpulist": "0-1,4-5,16-19\n",
            "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
            "sys/devices/system/node/node2/cpulist": "\n",
        }
        root = written(tmp_path, {**MEMORY, **nodes, **siblings})

        found = read_machine(root, {})

        assert found.nodes == {0: (0, 4, 1, 5), 1: (2, 6, 3, 7)}
        assert found.memory_bytes == 16 * GIB
        assert found.cpu_quota is None

    def test_the_least_limit_of_the_control_groups_above_counts(self, tmp_path: Path) -> None:
        root = written(
            tmp_path,
            {
                **MEMORY,
                "proc/self/cgroup": "0::/pod/container\n",
                "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/pod/container/memory.max": "max\n",
                "sys/fs/cgroup/pod/container/cpu.max": "250000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            },
        )

        found = read_machine(root, {})

        assert (found.memory_bytes, found.cpu_quota) == (4 * GIB, 2.5)

    def test_control_groups_of_version_1_count_as_well(self, tmp_path: Path) -> None:
        root = written(
            tmp_path,
            {
                **MEMORY,
                "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n1:name=systemd:/\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
        )

        found = read_machine(root, {})

        assert (found.memory_bytes, found.cpu_quota) == (2 * GIB, 3.0)

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"SLURM_MEM_PER_NODE": "1024"}, GIB),
            ({"SLURM_MEM_PER_CPU": "512"}, 4 * GIB),
            ({"SLURM_MEM_PER_NODE": "0"}, 16 * GIB),
        ],
    )
    def test_what_slurm_granted_counts(
        self, environ: dict[str, str], expected: int, tmp_path: Path
    ) -> None:
        assert read_machine(written(tmp_path, MEMORY), environ).memory_bytes == expected

    def test_the_nodes_of_gpus_are_known_where_all_of_them_are_seen(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = written(
            tmp_path,
            {
                **MEMORY,
                "proc/driver/nvidia/gpus/0000:17:00.0/information": "",
                "proc/driver/nvidia/gpus/0000:CA:00.0/information": "",
                "sys/bus/pci/devices/0000:17:00.0/numa_node": "1\n",
                "sys/bus/pci/devices/0000:ca:00.0/numa_node": "-1\n",
            },
        )
        for named, expected in (("0,1", {"0": 1}), ("0", {}), ("GPU-a,GPU-b", {})):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
            assert read_machine(root, {}).gpu_nodes == expected


def test_this_machine_can_be_read() -> None:
    found = read_machine()

    assert found.cpus == len(os.sched_getaffinity(0))
    assert 0 < found.memory_bytes < 2**63


def test_what_a_process_has_is_read_from_the_kernel_and_its_environment() -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    given = {"CUDA_VISIBLE_DEVICES": "1,GPU-7", "HPCTK_MEMORY_PER_WORKER": str(2**30)}

    assert own_place(given) == Place(cpus=cpus, gpus=("1", "GPU-7"), memory_bytes=2**30)
    assert own_place({}) == Place(cpus=cpus)
    assert own_place({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()


@pytest.mark.parametrize(
    "place", [Place(cpus=(0, 1), gpus=("0",), memory_bytes=2**30), Place(gpus=()), Place()]
)
def test_a_place_is_the_same_after_json(place: Place) -> None:
    assert Place.from_record(json.loads(json.dumps(place.to_record()))) == place
