"""Out of memory: how it is told apart, and how often a workload is asked for less."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.worker.loading import load_workload
from hpc_toolkit.worker.memory import TRIES, Shrinking, is_out_of_memory

HERE = __name__


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


def test_true_runs_the_items_again_with_their_context() -> None:
    workload = Asked(True)
    shrinking = Shrinking(workload)

    assert shrinking.ask(MemoryError(), "context", [{"id": 1}], 0) is None

    assert shrinking.context == "context"
    assert workload.asked == [("context", [{"id": 1}])]


def test_a_context_replaces_the_one_that_was_too_large() -> None:
    shrinking = Shrinking(Asked({"batch": 8}))

    assert shrinking.ask(MemoryError(), {"batch": 16}, [{}], 0) is None
    assert shrinking.context == {"batch": 8}


def test_what_cannot_be_smaller_is_reported_as_it_was() -> None:
    error = MemoryError()

    assert Shrinking(Asked(False)).ask(error, "context", [{}], 0) is error


def test_other_errors_ask_nothing() -> None:
    workload, error = Asked(), RuntimeError("CUDA error: device lost")

    assert Shrinking(workload).ask(error, "context", [{}], 0) is error
    assert not workload.asked


def test_one_item_is_run_again_a_bounded_number_of_times_and_the_next_as_often() -> None:
    workload = Asked()
    shrinking = Shrinking(workload)

    for index in range(2):
        answers = [shrinking.ask(MemoryError(), None, [{}], index) for _ in range(TRIES + 1)]
        assert answers[:-1] == [None] * TRIES
        assert isinstance(answers[-1], MemoryError)
    assert len(workload.asked) == 2 * TRIES


def test_an_error_of_on_oom_is_what_is_reported() -> None:
    wrong = KeyError("batch")

    assert Shrinking(Asked(wrong)).ask(MemoryError(), None, [{}], 0) is wrong


def test_on_oom_that_runs_out_itself_is_asked_again() -> None:
    workload = Asked(OutOfMemoryError(), "smaller")
    shrinking = Shrinking(workload)

    assert shrinking.ask(MemoryError(), None, [{}], 0) is None
    assert (shrinking.context, len(workload.asked)) == ("smaller", 2)


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


class WithWrongOnOom:
    on_oom = 3

    def load(self, group: Any) -> None: ...

    def run(self, context: Any, items: Any) -> Any: ...


def test_on_oom_that_cannot_be_called_is_refused() -> None:
    spec = WorkloadSpec(function=f"{HERE}:WithWrongOnOom")

    with pytest.raises(WorkloadError, match="on_oom is not a method on_oom"):
        load_workload(spec)


@pytest.mark.torch
def test_what_torch_says_of_the_hosts_memory_is_known() -> None:
    torch = pytest.importorskip("torch")

    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)

    assert is_out_of_memory(caught.value)
