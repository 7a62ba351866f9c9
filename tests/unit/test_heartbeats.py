"""A worker sends each heartbeat of a shared filesystem, and what it knows of others at first."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.rundir.layout import read_manifest
from hpc_toolkit.worker.worker import Worker, WorkerOptions
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

BEAT_S = 10.0


class Beating:
    """A worker that makes progress, and the heartbeats that it sent."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        toy = ToyRun(root / "r", 1)
        self.clock = ManualClock()
        self.worker = Worker(toy.paths, read_manifest(toy.root), WorkerOptions(), self.clock)
        self.path = toy.paths.worker(self.worker.name)
        self.sent_at: list[float] = []
        self._real = os.fdatasync
        monkeypatch.setattr(os, "fdatasync", self._sync)

    def _sync(self, fd: int) -> None:
        assert os.path.samestat(os.fstat(fd), self.path.stat())
        self.sent_at.append(self.clock.monotonic())
        self._real(fd)

    def work(self, seconds: float) -> None:
        """Finish two items a second."""
        for _ in range(int(2 * seconds)):
            self.clock.advance(0.5)
            self.worker._runner._tally.done += 1
            self.worker._tick()


@pytest.fixture
def beating(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beating]:
    monkeypatch.setenv("HPCTK_FILESYSTEM", "shared")
    one = Beating(fast_dir, monkeypatch)
    yield one
    one.worker.drop()


def test_heartbeats_of_a_busy_worker_are_sent_every_10_s_and_no_more_often(
    beating: Beating,
) -> None:
    began = beating.clock.monotonic()
    beating.work(60.0)

    assert beating.sent_at[0] - began < 1.0  # that it beats for its node
    gaps = [late - early for early, late in itertools.pairwise(beating.sent_at)]
    assert gaps == [BEAT_S] * 5
    found = read_presence(beating.path)
    assert found is not None
    assert found.heartbeat > 50  # progress in between is written without a sync


def test_a_heartbeat_that_cannot_be_sent_ends_the_worker(
    beating: Beating, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fails)

    with pytest.raises(OSError, match="Input/output error"):
        beating.work(BEAT_S)
