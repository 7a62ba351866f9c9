"""The thread that prefetches: one group at a time, the one named last, and nobody waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hpc_toolkit.worker.loading import Prefetch

LIMIT_S = 400.0


class Gated:
    """Each call of ``prefetch`` is told of, and returns when the test says so."""

    def __init__(self) -> None:
        self.begun: queue.Queue[Any] = queue.Queue()
        self.ended: queue.Queue[Any] = queue.Queue()
        self.gate = threading.Semaphore(0)

    def prefetch(self, group: Any) -> None:
        self.begun.put(group)
        self.gate.acquire()
        self.ended.put(group)
        if group == "bad":
            message = "no such\ncheckpoint"
            raise SystemExit(message)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def opened() -> Prefetch:
    ahead = Prefetch()
    ahead.open()
    return ahead


@pytest.fixture
def gated() -> Iterator[Gated]:
    workload = Gated()
    yield workload
    workload.gate.release(100)
    for thread in threads():
        thread.join(LIMIT_S)


def test_a_call_that_takes_long_holds_nobody_up_and_the_group_named_last_is_next(
    gated: Gated,
) -> None:
    ahead = opened()

    for group in "abc":
        ahead.name(gated, group)
        if group == "a":
            assert gated.begun.get(timeout=LIMIT_S) == "a"

    assert gated.begun.empty(), "two calls at once"
    gated.gate.release()
    assert gated.begun.get(timeout=LIMIT_S) == "c"


def test_nothing_is_prefetched_before_a_group_was_loaded(gated: Gated) -> None:
    ahead = Prefetch()

    ahead.name(gated, "a")
    ahead.name(gated, "b")
    assert not threads()

    ahead.open()
    assert gated.begun.get(timeout=LIMIT_S) == "b"


def test_what_was_named_is_kept_where_nothing_new_is_known(gated: Gated) -> None:
    """With each further unit of the group that is loaded."""
    ahead = opened()
    ahead.name(gated, "a")
    assert gated.begun.get(timeout=LIMIT_S) == "a"
    ahead.name(gated, "b")

    ahead.name(gated, None, loads="loaded")
    gated.gate.release()

    assert gated.begun.get(timeout=LIMIT_S) == "b"


def test_where_no_thread_can_be_had_the_work_goes_on(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    ahead = opened()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        ahead.name(gated, "a")
    assert "'a' is not prefetched: RuntimeError: can't start" in capfd.readouterr().err

    ahead.name(gated, "b")

    assert gated.begun.get(timeout=LIMIT_S) == "b"


class WithNumber:
    """Has an attribute of that name for itself."""

    prefetch = 2


@pytest.mark.parametrize(
    ("workload", "group"), [(object(), "a"), (WithNumber(), "a"), (Gated(), None)]
)
def test_no_thread_starts_where_there_is_nothing_to_prefetch(
    workload: object, group: str | None
) -> None:
    opened().name(workload, group)

    assert not threads()
