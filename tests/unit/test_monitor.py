"""What the monitor writes. No GPU is needed: a class of this file stands for NVIDIA's library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hpc_toolkit.training.monitor import (
    Recording,
    Sampler,
    read_recordings,
    record,
    summarise,
)


class Told:
    """An answer with fields."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class FakeNvml:
    """Stands for pynvml on a host with two GPUs, of which the second has no power and no NVLink."""

    NVML_TEMPERATURE_GPU = 0
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX

    class NVMLError(Exception):
        """The library's own."""

    def __init__(self, *, absent: bool = False) -> None:
        self.absent = absent
        self.shut = 0
        self.watts = 100_000
        self.link_kib = 7_000_000

    def __getattr__(self, name: str) -> Any:
        """``nvmlDeviceGetName`` is ``get_name``."""
        words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]+", name.replace("Device", ""))
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return getattr(self, "_".join(words).lower())

    def init(self) -> None:
        if self.absent:
            message = "NVML Shared Library Not Found"
            raise self.NVMLError(message)

    def shutdown(self) -> None:
        self.shut += 1

    def get_count(self) -> int:
        return 2

    def get_handle_by_index(self, index: int) -> int:
        return index

    def get_name(self, handle: int) -> bytes:
        return b"GPU %d" % handle

    def get_uuid(self, handle: int) -> str:
        return f"GPU-{handle}"

    def get_memory_info(self, handle: int) -> Told:
        return Told(total=80 << 30, used=(handle + 1) << 30)

    def get_utilization_rates(self, handle: int) -> Told:
        return Told(gpu=90 - handle, memory=40)

    def get_enforced_power_limit(self, handle: int) -> int:
        return 700_000

    def get_power_usage(self, handle: int) -> int:
        if handle == 1:
            message = "Not Supported"
            raise self.NVMLError(message)
        self.watts += 100_000
        return self.watts

    def get_temperature(self, handle: int, kind: int) -> int:
        assert kind == self.NVML_TEMPERATURE_GPU
        return 50 + handle

    def get_field_values(self, handle: int, fields: list[tuple[int, int]]) -> Any:
        """The library's own structures, so that a name that it does not have is noticed."""
        values = (pynvml.c_nvmlFieldValue_t * len(fields))()
        self.link_kib += 1000
        for value, (field, scope) in zip(values, fields, strict=True):
            assert scope == 0xFFFFFFFF  # nvml.h: the sum over all links
            value.fieldId, value.nvmlReturn = field, pynvml.NVML_SUCCESS
            if handle == 1:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
            sent = field == self.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
            value.value.ullVal = self.link_kib if sent else 5
        return values


def ports(root: Path, sent: int) -> Path:
    counters = root / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True, exist_ok=True)
    (counters / "port_xmit_data").write_text(f"{sent}\n")
    (counters / "port_rcv_data").write_text("7\n")
    return root


def sampled(path: Path, sampler: Sampler, count: int) -> None:
    """Write ``count`` samples without waiting."""
    left = iter(range(1, count + 1))
    # The last one ends it; the interval is so short that none is left out.
    record(sampler, path, 1e-9, lambda _wait_s: next(left) == count)


def test_a_sample_tells_cpus_memory_network_gpus_and_infiniband(tmp_path: Path) -> None:
    nvml = FakeNvml()
    root = ports(tmp_path / "infiniband", 100)
    sampler = Sampler(nvml=nvml, infiniband=root)
    ports(root, 350)

    sampled(tmp_path / "m.jsonl", sampler, 3)

    (recording,) = read_recordings(tmp_path / "m.jsonl")
    header, samples = recording.header, recording.samples
    assert header["pid"] == os.getpid()
    assert header["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    assert header["gpus"][1] == {
        "index": 1,
        "name": "GPU 1",
        "uuid": "GPU-1",
        "memory_bytes": 80 << 30,
        "power_limit_w": 700.0,
    }
    assert header["infiniband"] == ["mlx5_0/1"]
    assert len(samples) == 3
    assert samples[0]["rss_bytes"] > 1 << 20
    assert samples[0]["processes"] >= 1
    assert len(samples[0]["each_cpu_percent"]) == header["cpus"]
    assert samples[0]["memory_used_bytes"] < header["memory_bytes"]
    assert samples[0]["infiniband"] == {"mlx5_0/1": {"sent_bytes": 1000, "received_bytes": 0}}
    assert samples[0]["gpus"][0]["power_w"] == 200.0
    assert samples[0]["gpus"][1] == {
        "index": 1,
        "busy_percent": 89,
        "memory_busy_percent": 40,
        "memory_used_bytes": 2 << 30,
        "power_w": None,
        "temperature_c": 51,
        "nvlink_sent_bytes": None,
        "nvlink_received_bytes": None,
    }
    assert nvml.shut == 1


def test_a_summary_has_means_maxima_and_energy() -> None:
    samples = [
        {"t_s": at, "cpu_percent": at, "rss_bytes": 9 - at, "gpus": [{"power_w": 100.0 * at}]}
        for at in (1.0, 2.0, 4.0)
    ]

    found = summarise(Recording({"host": "n1", "gpus": [{"index": 0}]}, samples))

    assert found["seconds"] == 4.0
    assert found["cpu_percent_mean"] == pytest.approx(7 / 3)
    assert found["rss_bytes_max"] == 8.0
    assert found["gpus"][0]["energy_j"] == pytest.approx(150.0 + 600.0)
    assert found["gpus"][0]["busy_percent_mean"] is None
    assert summarise(Recording({"gpus": [{"index": 0}]}))["gpus"][0]["energy_j"] is None


def test_each_start_of_a_monitor_adds_its_header_and_damage_costs_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sampled(path, Sampler(nvml=FakeNvml()), 2)
    with path.open("ab") as file:
        file.write(b'{"type":"sample","t_s":\n')
    sampled(path, Sampler(nvml=FakeNvml()), 1)

    assert [len(one.samples) for one in read_recordings(path)] == [2, 1]
    assert read_recordings(tmp_path / "none.jsonl") == []


WATCHED = """
import os, sys
from pathlib import Path
from hpc_toolkit.training.monitor import watching

children = Path(f"/proc/self/task/{os.getpid()}/children")
with watching(Path("/no such directory/m.jsonl")):
    print("goes on")
with watching(Path(sys.argv[1]), 3600):
    print(os.getpid(), len(os.listdir("/proc/self/task")), len(children.read_text().split()))
print(len(children.read_text().split()))
"""


def test_watching_samples_this_process_from_a_child_without_a_thread(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"

    # In a process of its own: other tests leave native threads, some of which end at a fork.
    words = [sys.executable, "-c", WATCHED, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    went_on, *numbers = done.stdout.splitlines()
    assert went_on == "goes on"
    assert "warning: the monitor stopped: [Errno 2] No such file or directory" in done.stderr
    pid, threads, during, after = map(int, " ".join(numbers).split())
    assert (threads, during, after) == (1, 1, 0)
    (recording,) = read_recordings(path)
    assert recording.header["pid"] == pid
    assert len(recording.samples) == 1
    assert recording.samples[0]["processes"] >= 1
