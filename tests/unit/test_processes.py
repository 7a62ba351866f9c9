"""What processes need of the kernel; a coordinator that is killed again and again."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli.campaigns import work_campaign
from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.system.processes import readable
from hpc_toolkit.worker.worker import WorkerOptions

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


@pytest.fixture
def told() -> Iterator[list[int]]:
    """The SIGTERMs that this process sends to itself."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


class PlayedRun:
    """Workers that do what a test says."""

    def __init__(self, root: Path, work: Callable[[Callable[[], None]], int]) -> None:
        self.root = root
        self._work = work

    def work(self, _workers: int, _options: WorkerOptions, *, on_tick: Callable[[], None]) -> int:
        return self._work(on_tick)


def play(root: Path, work: Callable[[Callable[[], None]], int]) -> int:
    run: Any = PlayedRun(root, work)
    return work_campaign(run, 1, WorkerOptions())


def test_a_coordinator_that_is_killed_again_and_again_is_given_up_unless_it_lived_long(
    tmp_path: Path, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program, starts = tmp_path / "coordinator", tmp_path / "starts"
    program.write_text(f"#!/bin/sh\necho >> {starts}\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def drained(tick: Callable[[], None]) -> int:
        while not told:
            tick()
            if starts.exists() and len(starts.read_text()) >= long_lives:
                monkeypatch.setattr("hpc_toolkit.system.processes._LONG_S", 600.0)
        return TRY_AGAIN

    long_lives = 1000
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        play(tmp_path, drained)
    assert len(starts.read_text()) == 6

    starts.unlink()
    told.clear()
    long_lives = 10
    monkeypatch.setattr("hpc_toolkit.system.processes._LONG_S", -1.0)
    with pytest.raises(HpcToolkitError, match=r"the coordinator of .* ended with exit code 137"):
        play(tmp_path, drained)
    assert len(starts.read_text()) >= 14
