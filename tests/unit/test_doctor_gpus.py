"""GPUs as drivers and torch tell of them; no driver is asked here, and no torch imported."""

from __future__ import annotations

import ctypes
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.doctor import node
from hpc_toolkit.system.gpus import ask_driver

if TYPE_CHECKING:
    pass

GIB = 2**30
GPU = {"name": "NVIDIA L40S", "total": 44 * GIB, "free": 43 * GIB}
ALL_OF_IT = "NVIDIA L40S, 44.0 GiB (43.0 GiB free)"
DRIVER = {"driver": "550.54", "cuda": 12040, "gpus": [GPU, GPU]}
TORCH = {"torch": "2.5.1", "cuda": "12.4", "gpus": [""]}


class Library(SimpleNamespace):
    """libnvidia-ml with so many GPUs, of which some are off the bus."""

    def __init__(self, count: int, lost: tuple[int, ...] = (), start: int = 0) -> None:
        def put(value: Any, result: int = 0) -> Any:
            def call(*args: Any) -> int:
                args[-1]._obj.value = value
                return result

            return call

        def words(text: bytes) -> Any:
            def call(*args: Any) -> int:
                args[-2].value = text
                return 0

            return call

        def handle(index: Any, device: Any) -> int:
            device._obj.value = index.value + 1
            return 0

        def memory(device: Any, told: Any) -> int:
            told._obj.total, told._obj.free = 44 * GIB, 43 * GIB
            return 15 if device.value - 1 in lost else 0

        super().__init__(
            nvmlInit_v2=lambda: start,
            nvmlShutdown=lambda: 0,
            nvmlErrorString=lambda code: f"reason {code}".encode(),
            nvmlSystemGetDriverVersion=words(b"550.54"),
            nvmlSystemGetCudaDriverVersion_v2=put(12040),
            nvmlDeviceGetCount_v2=put(count),
            nvmlDeviceGetHandleByIndex_v2=handle,
            nvmlDeviceGetName=words(b"NVIDIA L40S"),
            nvmlDeviceGetMemoryInfo=memory,
        )


def test_a_gpu_that_is_off_the_bus_is_told_with_the_drivers_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(2, lost=(1,)))

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


def words_of(told: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    return [(one["check"], one["verdict"], one["found"]) for one in told]


def test_gpus_that_answer_and_compute_are_fine(here: dict[str, Any]) -> None:
    told = node.look_at_gpus()

    assert words_of(told) == [
        (
            "gpus",
            "fine",
            f"2 x {ALL_OF_IT}; driver 550.54, for CUDA up to 12.4",
        ),
        (
            "torch",
            "fine",
            "torch 2.5.1 for CUDA 12.4 computes on 1 GPU",
        ),
    ]
    assert here["asked"] == ["driver", "torch"]


@pytest.mark.parametrize(
    ("driver", "verdict", "words"),
    [
        (None, "skipped", "no driver on this node"),
        ({**DRIVER, "gpus": []}, "skipped", "none that this process may use"),
        ({"error": "reason 9"}, "unsafe", "the driver does not work: reason 9"),
        ({"error": "no answer within 25 s"}, "unsafe", "no answer within 25 s"),
    ],
)
def test_without_a_gpu_that_works_torch_is_not_imported(
    here: dict[str, Any], driver: Any, verdict: str, words: str
) -> None:
    here["driver"] = driver

    told = node.look_at_gpus()

    ((check, found_verdict, found),) = words_of(told)
    assert (check, found_verdict) == ("gpus", verdict)
    assert words in found
    assert here["asked"] == ["driver"]


def hang() -> None:
    time.sleep(60)


def lack() -> None:
    message = "libcudart.so.12: no such file\nand more"
    raise ImportError(message)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (hang, "no answer within 0.1 s"),
        (lack, "ImportError: libcudart.so.12: no such file"),
    ],
)
def test_a_call_that_hangs_or_dies_is_an_error_in_words(call: Any, words: str) -> None:
    assert node._asked(call, 0.1 if call is hang else 10)["error"].startswith(words)
