"""The samples of ``--monitor``: their contents, and the process that takes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.training import monitor
from hpc_toolkit.training.monitor import Sampler, record


class NotSupportedError(Exception):
    """The library's own."""


def busy(gpu: int) -> Any:
    if gpu == 1:
        raise NotSupportedError
    return SimpleNamespace(gpu=90)


def fake_nvml(shut: list[bool]) -> Any:
    """Stand for pynvml on a host with two GPUs, of which the second tells no load."""
    return SimpleNamespace(
        NVMLError=NotSupportedError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: shut.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=(handle + 1) << 30),
        nvmlDeviceGetUtilizationRates=busy,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sample_tells_cpus_memory_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 1e-9)  # so short that none is left out
    shut: list[bool] = []
    left = iter((False, False, True))

    record(Sampler(nvml=fake_nvml(shut)), tmp_path / "m.jsonl", lambda _wait_s: next(left))

    header, *samples = lines_of(tmp_path / "m.jsonl")
    assert header["pid"] == os.getpid()
    assert header["cpus_allowed"] == sorted(os.sched_getaffinity(0))
    assert len(samples) == 3
    assert samples[0]["rss_bytes"] > 1 << 20
    assert samples[0]["processes"] >= 1
    assert len(samples[0]["each_cpu_percent"]) == os.cpu_count()
    assert samples[0]["gpus"] == [
        {"busy_percent": 90, "memory_used_bytes": 1 << 30},
        {"busy_percent": None, "memory_used_bytes": 2 << 30},
    ]
    assert shut == [True]


WATCHED = """
import os, sys
from pathlib import Path
from hpc_toolkit.training.monitor import watching

children = Path(f"/proc/self/task/{os.getpid()}/children")
with watching(Path("/no such directory/m.jsonl")):
    print("goes on")
with watching(Path(sys.argv[1])):
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
    header, sample = lines_of(path)
    assert header["pid"] == pid
    assert sample["processes"] >= 1
