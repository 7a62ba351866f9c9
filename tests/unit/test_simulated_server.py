"""A simulated file server: what it counts, how long it takes, and what a host sees late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from simulation.fileserver import FileServer
from simulation.worker import VirtualClock

CLOCK = VirtualClock()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    """Between the test and its directory; host "a" has made a directory and looked for a name."""
    CLOCK.now = 0.0
    (tmp_path / "claims").mkdir()
    one = FileServer()
    with one.between(tmp_path, CLOCK):
        yield one


def make(server: FileServer, host: str, path: Path) -> None:
    server.host = host
    path.symlink_to("worker")


def test_a_missing_name_is_found_late_and_listed_at_once(
    server: FileServer, tmp_path: Path
) -> None:
    path = tmp_path / "claims/1"
    server.host = "a"
    assert not path.is_symlink()
    make(server, "b", path)

    server.host = "a"
    CLOCK.now = 29.0
    assert not path.is_symlink()
    CLOCK.now = 31.0
    assert path.is_symlink()

    late = tmp_path / "claims/2"
    assert not late.is_symlink()
    make(server, "b", late)
    server.host = "a"
    assert sorted(os.listdir(tmp_path / "claims")) == ["1", "2"]
    assert late.is_symlink()


def test_a_host_reads_a_file_again_only_after_a_change(server: FileServer, tmp_path: Path) -> None:
    path = tmp_path / "head"

    def read(times: int) -> int:
        before = server.requests["read", "head"]
        for _ in range(times):
            with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
                os.read(file.fileno(), 10)
        return server.requests["read", "head"] - before

    server.host = "a"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"1")
    server.host = "b"

    assert read(3) == 1
    os.write(fd, b"2")
    assert server.requests["write", "head"] == 0
    server.host = "a"
    os.write(fd, b"3")
    os.fdatasync(fd)
    os.close(fd)
    assert server.requests["write", "head"] == 1
    server.host = "b"
    assert read(2) == 1
