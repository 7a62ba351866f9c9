"""What a node shows doctor: Slurm and GPUs, as the test plays them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_toolkit.doctor import node
from hpc_toolkit.system.gpus import ask_driver

CONFIG = """Configuration data as of 2026-01-01T00:00:00
ClusterName             = narwhal
SLURM_VERSION           = 22.05.8
"""
PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one directory in which programs are looked for, beside those of the system."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(path: Path, text: str, *programs: str) -> None:
    for name in programs:
        (path / name).write_text(f"#!/bin/sh\n{text}\n")
        (path / name).chmod(0o755)


@pytest.mark.parametrize(
    ("programs", "scontrol", "verdict", "found"),
    [
        (PROGRAMS, f"echo '{CONFIG}'", "fine", "22.05.8 of cluster narwhal answered in "),
        (PROGRAMS, "echo 'No controller answers' >&2; exit 1", "unknown", "No controller answers"),
        (("sbatch", "scancel"), "exit 0", "unknown", "srun, squeue cannot be found"),
    ],
)
def test_slurm_tells_its_version_or_why_it_is_unknown(
    path: Path, programs: tuple[str, ...], scontrol: str, verdict: str, found: str
) -> None:
    install(path, "exit 0", *programs)
    install(path, scontrol, "scontrol")

    told = node.check_slurm()

    assert (told.check, str(told.verdict)) == ("slurm", verdict)
    assert found in told.found


GIB = 2**30
GPU = {"name": "NVIDIA L40S", "total": 44 * GIB, "free": 43 * GIB}
ALL_OF_IT = "NVIDIA L40S, 44.0 GiB (43.0 GiB free)"
DRIVER = {"driver": "550.54", "cuda": 12040, "gpus": [GPU, GPU]}
TORCH = {"torch": "2.5.1", "cuda": "12.4", "gpus": [""]}


def library(count: int, lost: tuple[int, ...] = ()) -> SimpleNamespace:
    """libnvidia-ml with so many GPUs, of which some are off the bus."""

    def put(value: Any) -> Callable[..., int]:
        def call(*args: Any) -> int:
            args[-1]._obj.value = value(args[0]) if callable(value) else value
            return 0

        return call

    def words(text: bytes) -> Callable[..., int]:
        def call(*args: Any) -> int:
            args[-2].value = text
            return 0

        return call

    def memory(device: Any, told: Any) -> int:
        told._obj.total, told._obj.free = 44 * GIB, 43 * GIB
        return 15 if device.value - 1 in lost else 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlShutdown=lambda: 0,
        nvmlErrorString=lambda code: f"reason {code}".encode(),
        nvmlSystemGetDriverVersion=words(b"550.54"),
        nvmlSystemGetCudaDriverVersion_v2=put(12040),
        nvmlDeviceGetCount_v2=put(count),
        nvmlDeviceGetHandleByIndex_v2=put(lambda index: index.value + 1),
        nvmlDeviceGetName=words(b"NVIDIA L40S"),
        nvmlDeviceGetMemoryInfo=memory,
    )


def test_a_gpu_that_is_off_the_bus_is_told_with_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library(2, lost=(1,)))

    told = ask_driver()

    assert told is not None
    assert told["gpus"] == [GPU, {"error": "reason 15"}]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What driver and torch say; a test changes it. Neither is asked in a child."""
    told: dict[str, Any] = {"driver": DRIVER, "torch": TORCH, "asked": []}

    def answer(call: Any, _timeout_s: float) -> Any:
        name = "driver" if call is ask_driver else "torch"
        told["asked"].append(name)
        return told[name]

    monkeypatch.setattr(node, "_asked", answer)
    monkeypatch.setattr(node, "find_spec", lambda name: told.get("spec", name))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return told


def test_gpus_that_answer_and_compute_are_fine(here: dict[str, Any]) -> None:
    told = [(one["check"], one["verdict"], one["found"]) for one in node.look_at_gpus()]

    assert told == [
        ("gpus", "fine", f"2 x {ALL_OF_IT}; driver 550.54, for CUDA up to 12.4"),
        ("torch", "fine", "torch 2.5.1 for CUDA 12.4 computes on 1 GPU"),
    ]
    assert here["asked"] == ["driver", "torch"]
