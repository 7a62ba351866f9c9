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
