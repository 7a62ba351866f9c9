"""Out of memory: how it is told apart, and how often a workload is asked for less."""

from __future__ import annotations

import shlex
import weakref
from typing import Any

import pytest

from hpc_toolkit.errors import PermanentError
from hpc_toolkit.worker.command import CommandWorkload
from hpc_toolkit.worker.memory import Shrinking, out_of


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class OfADriverError(OutOfMemoryError):
    """A kind of it."""


class CuPyError(OutOfMemoryError, MemoryError):
    """Named and derived like CuPy's."""


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def circular() -> Exception:
    first, second = RuntimeError("rank 0"), RuntimeError("rank 1")
    first.__cause__, second.__cause__ = second, first
    return first


class Asked:
    """Answers as told, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[Any, list[Any]]] = []

    def on_oom(self, context: Any, items: list[Any]) -> Any:
        self.asked.append((context, items))
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (MemoryError("exit code 1\nlast lines of stderr:\nCUDA out of memory"), "oom"),
        (OutOfMemoryError(), "gpu_oom"),
        (OfADriverError(), "gpu_oom"),
        (CuPyError("Out of memory allocating 512 bytes"), "gpu_oom"),
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), "gpu_oom"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "gpu_oom"),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), "gpu_oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "gpu_oom"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu_oom"),
        (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), "gpu_oom"),
        (MemoryError("std::bad_alloc: out_of_memory: CUDA error at: memory.hpp"), "gpu_oom"),
        (RuntimeError("No executable batch size found, reached zero."), "gpu_oom"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), "gpu_oom"),
        (MemoryError("exit code 1; its stderr ends with: CUDA out of memory."), "gpu_oom"),
        (RuntimeError("CUDA error: device lost"), ""),
        (RuntimeError("membership out of memory cards"), ""),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), ""),
        (ValueError("CUDA out of memory"), ""),
        (raised_from(ValueError("batch 64"), OutOfMemoryError()), "gpu_oom"),
        (raised_from(KeyError(1), raised_from(ValueError(), MemoryError())), "oom"),
        (ExceptionGroup("two", [ValueError(), OutOfMemoryError()]), "gpu_oom"),
        (raised_from(ValueError(), ExceptionGroup("one", [MemoryError()])), "oom"),
        (raised_from(PermanentError("batch 1 does not fit"), OutOfMemoryError()), ""),
        (raised_from(ValueError(), KeyError()), ""),
        (circular(), ""),
    ],
)
def test_the_memory_that_ran_out_is_recognised(error: Exception, memory: str) -> None:
    assert out_of(error) == memory


WRONG = KeyError("batch")
TOO_LARGE = MemoryError()
LOST = RuntimeError("CUDA error: device lost")


@pytest.mark.parametrize(
    ("answers", "error", "reported", "context", "asked"),
    [
        ([True], TOO_LARGE, None, "context", 1),
        ([{"batch": 8}], TOO_LARGE, None, {"batch": 8}, 1),
        ([False], TOO_LARGE, TOO_LARGE, "context", 1),
        ([True], LOST, LOST, "context", 0),
        ([WRONG], TOO_LARGE, WRONG, "context", 1),
        # That runs out of memory itself.
        ([OutOfMemoryError(), "smaller"], TOO_LARGE, None, "smaller", 2),
    ],
)
def test_the_answer_of_on_oom_runs_the_items_again_or_is_reported(
    answers: list[Any], error: Exception, reported: Any, context: Any, asked: int
) -> None:
    workload = Asked(*answers)
    shrinking = Shrinking(workload)

    assert shrinking.ask(error, "context", [{"id": 1}], 0) is reported

    if reported is None:
        assert shrinking.context == context
    assert workload.asked == [("context", [{"id": 1}])] * asked


class Tensor:
    """Something large."""


def test_what_the_failed_call_held_is_free_when_on_oom_is_asked() -> None:
    kept: list[weakref.ref[Tensor]] = []
    seen: list[Tensor | None] = []

    class Looking:
        def on_oom(self, context: Any, items: list[Any]) -> bool:
            seen.append(kept[0]())
            return False

    def fail_with_locals() -> None:
        large = Tensor()
        kept.append(weakref.ref(large))
        try:
            raise OutOfMemoryError
        except OutOfMemoryError as error:
            message = "wrapped"
            raise MemoryError(message) from error

    try:
        fail_with_locals()
    except MemoryError as error:
        Shrinking(Looking()).ask(error, None, [{}], 0)

    assert seen == [None]


@pytest.mark.torch
def test_what_torch_says_of_the_hosts_memory_and_of_a_gpus_is_known() -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert out_of(caught.value) == "oom"
    # A stand-in: torch for CPUs has the class, and no GPU raises it here.
    assert out_of(torch.cuda.OutOfMemoryError("CUDA out of memory.")) == "gpu_oom"


TORCH = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("stderr", "memory", "shown"),
    [
        (f"Traceback (most recent call last):\n{TORCH}\n\n", "gpu_oom", f"ends with: {TORCH}"),
        # What torch and srun add after it, and the launcher's own traceback.
        (f"[rank3]: {TORCH}\n[rank3]:[W1 N.cpp:1] Warning: WARNING\n", "gpu_oom", TORCH),
        (f"2: {TORCH}\nsrun: error: n1: task 2: Exited with exit code 1\n", "gpu_oom", TORCH),
        (f"{TORCH}\n{'line of a launcher ' * 300}\nChildFailedError:\n=====\n", "gpu_oom", TORCH),
        ("numpy.core.MemoryError: 8 GiB\nsrun: error\n", "oom", "numpy.core.MemoryError: 8 GiB"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0\n", "oom", "oom_kill event"),
        ("MemoryErrors: 0\nfailed\n", "", "ends with: failed"),
        ("out of memory\nwrong option\n", "", "wrong option"),
        ("warning: torch.OutOfMemoryError was handled\nfailed\n", "", "ends with: failed"),
    ],
)
def test_the_memory_that_a_command_lacked_is_recognised_by_its_stderr(
    stderr: str, memory: str, shown: str
) -> None:
    command = CommandWorkload(f"printf %s {shlex.quote(stderr)} >&2; exit 1")

    with pytest.raises((MemoryError, RuntimeError)) as caught:
        list(command.run(None, iter([{}])))

    assert out_of(caught.value) == memory
    assert shown in str(caught.value).partition("\n")[0]


def test_a_command_that_somebody_killed_did_not_run_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        list(CommandWorkload("kill -9 $$").run(None, iter([{}])))

    assert out_of(caught.value) == ""


def test_an_error_whose_attributes_fail_is_only_an_error() -> None:
    def fail(_: object) -> object:
        raise OSError

    attributes = dict.fromkeys(("__class__", "__cause__", "exceptions"), property(fail))
    strange = type("Strange", (ExceptionGroup,), attributes)

    assert out_of(strange("x", [ValueError()])) == ""
    assert out_of(strange("x", [MemoryError()])) == "oom"
