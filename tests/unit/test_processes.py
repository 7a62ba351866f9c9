"""What processes need of the kernel."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from hpc_toolkit.system.processes import readable

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
