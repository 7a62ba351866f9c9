"""Out of memory: how it is told apart, and how often a workload is asked for less."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hpc_toolkit.worker.memory import Shrinking, is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named like torch's."""


class OfADriverError(OutOfMemoryError):
    """A kind of it."""


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
    ("error", "told"),
    [
        (MemoryError(), True),
        (OutOfMemoryError(), True),
        (OfADriverError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (ValueError("DefaultCPUAllocator: can't allocate memory"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (ValueError(), False),
    ],
)
def test_out_of_memory_is_told_by_the_errors_type(error: Exception, told: bool) -> None:
    assert is_out_of_memory(error) is told


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


def fail_with_locals(kept: list[weakref.ref[Tensor]]) -> None:
    large = Tensor()
    kept.append(weakref.ref(large))
    try:
        raise OutOfMemoryError
    except OutOfMemoryError as error:
        message = "wrapped"
        raise MemoryError(message) from error


def test_what_the_failed_call_held_is_free_when_on_oom_is_asked() -> None:
    kept: list[weakref.ref[Tensor]] = []
    seen: list[Tensor | None] = []

    class Looking:
        def on_oom(self, context: Any, items: list[Any]) -> bool:
            seen.append(kept[0]())
            return False

    failure: BaseException | None = None
    try:
        fail_with_locals(kept)
    except MemoryError as error:
        failure = error
    assert failure is not None
    Shrinking(Looking()).ask(failure, None, [{}], 0)

    assert seen == [None]


@pytest.mark.torch
def test_what_torch_says_of_the_hosts_memory_is_known() -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)
