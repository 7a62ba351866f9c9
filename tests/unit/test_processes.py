"""What processes need of the kernel."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.system.processes import interrupts_held, readable

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 1024
"""Descriptors that select(2) knows."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose reading end has a number that select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= MOST:
        pytest.skip("this user may open no more than 1024 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MOST + 8), hard))
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, MOST)
    os.close(read)
    yield high, write
    os.close(high)
    os.close(write)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_readable_takes_the_descriptors_of_a_process_with_many_files(pipe: tuple[int, int]) -> None:
    read, write = pipe
    assert readable(read, timeout_s=0.0) == set()

    os.write(write, b"x")

    assert readable(read, timeout_s=10.0) == {read}


def test_readable_tells_the_end_of_a_pipe() -> None:
    read, write = os.pipe()
    os.close(write)

    assert readable(read) == {read}
    os.close(read)


def test_an_interrupt_that_is_held_comes_when_it_is_let_go() -> None:
    order = []
    with pytest.raises(KeyboardInterrupt), interrupts_held() as let_go:  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        order.append("goes on")
        let_go()
        order.append("is not reached")

    assert order == ["goes on"]


def test_an_interrupt_that_is_held_comes_at_the_end_at_the_latest() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is before


def test_interrupts_are_left_alone_outside_the_main_thread() -> None:
    found = []

    def hold() -> None:
        with interrupts_held() as let_go:
            found.append(signal.getsignal(signal.SIGINT))
            let_go()

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()

    assert found == [before]
