"""A view that looks again and again reads few files, and still sees everything in the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.status import read_status
from hpc_toolkit.results.workers import FILES_PER_S, Sampler, living_workers, pause_s, read_hosts
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

NOW = 1_800_000_000.0


class Opened:
    """Counts the presences and journals that a view opens."""

    def __init__(self, view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("presence", "poll_journal"):
            monkeypatch.setattr(view, name, self._counted(getattr(view, name)))

    def _counted(self, real: Any) -> Any:
        def call(worker: str) -> Any:
            self.count += 1
            return real(worker)

        return call

    def since(self) -> int:
        found, self.count = self.count, 0
        return found


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCTK_FILESYSTEM", "shared")


@pytest.mark.usefixtures("shared")
def test_a_large_run_is_read_in_turn_and_no_progress_is_missed(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, clock = ToyRun(fast_dir / "r", 200, unit=1), ManualClock(NOW)
    workers = [toy.worker(f"h{n % 5}-{n}-a", host=f"h{n % 5}", at=NOW) for n in range(200)]
    view = toy.run.view
    opened, sampler = Opened(view, monkeypatch), Sampler(view, clock)

    assert len(sampler.look()) == 200
    assert opened.since() == 400

    for number, one in enumerate(workers):
        one.claim(toy.unit_name(number))
        one.attempt(number)
        one.release()
        one.presence.update(done=1, journal=one.journal.size)
    looks = 0
    while not view.complete:
        clock.advance(2.0)
        sampler.look()
        assert opened.since() <= 2 * FILES_PER_S + 1
        looks += 1
        assert looks < 20
    assert looks == 5


@pytest.mark.usefixtures("shared")
def test_the_status_of_samples_is_that_of_all_files(fast_dir: Path) -> None:
    toy, clock = ToyRun(fast_dir / "r", 8, unit=2), ManualClock(NOW)
    fine, dead = toy.worker("fine", at=NOW), toy.worker("dead", at=NOW - 3600, host="there")
    sampler = Sampler(toy.run.view, clock)
    sampler.look()
    fine.work(toy.unit_name(0), i0="done", i1="permanent")
    fine.presence.update(done=1, failed=1, journal=fine.journal.size)
    dead.claim(toy.unit_name(2))
    clock.advance(11.0)
    fine.presence.update(at=clock.wall())

    seen = sampler.look()

    whole = read_status(toy.view(), clock, given="r")
    assert read_status(toy.run.view, clock, given="r", seen=seen) == whole
    alive = living_workers(toy.run.view, clock, seen)
    assert alive == {"fine"}
    hosts = read_hosts(toy.run.view, seen, alive)
    assert [(one.host, one.alive, one.busy, one.died) for one in hosts] == [
        ("there", 0, 0, 1),
        ("here", 1, 0, 0),
    ]


@pytest.mark.parametrize(("filesystem", "seconds"), [("local", 2.0), ("shared", 10.0)])
def test_a_process_that_reads_everything_pauses_longer_with_more_workers(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, filesystem: str, seconds: float
) -> None:
    monkeypatch.setenv("HPCTK_FILESYSTEM", filesystem)
    toy = ToyRun(fast_dir / "r", 1, unit=1)
    for number in range(200):
        toy.worker(f"h-{number}-a", host="h", at=NOW)
    toy.run.view.poll()

    assert pause_s(toy.run.view, 2.0) == pytest.approx(seconds)
