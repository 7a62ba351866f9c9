"""What a view of a run that is refreshed shows, and how often it reads."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.cli import statusview
from hpc_toolkit.errors import RunError
from hpc_toolkit.results.status import Status, read_status
from hpc_toolkit.results.workers import pause_s, read_hosts
from hpc_toolkit.run import Run
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

NOW = 1_800_000_000.0


def test_hosts_with_dead_and_idle_workers_come_first(fast_dir: Path) -> None:
    toy, clock = ToyRun(fast_dir / "r", 8, unit=2), ManualClock(NOW)
    fine, dead = toy.worker("fine", at=NOW), toy.worker("dead", at=NOW - 3600, host="there")
    fine.work(toy.unit_name(0), i0="done", i1="permanent")
    dead.claim(toy.unit_name(2))
    view = toy.view()
    seen = view.presences()

    now = read_status(view, clock, given="r", seen=seen)

    assert now == read_status(toy.view(), clock, given="r")
    hosts = read_hosts(view, seen, now.alive)
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


def test_a_run_that_is_removed_while_it_is_read_is_not_shown(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ToyRun(fast_dir / "r", 8, unit=2).reopen()
    shown = list[Status]()
    read = Run.status

    def status(self: Run, **facts: Any) -> Status:
        if not shown:
            return read(self, **facts)
        shutil.rmtree(fast_dir / "r")
        raise FileNotFoundError(2, "No such file or directory", "r/stages/items/head")

    monkeypatch.setattr(Run, "status", status)

    with pytest.raises(RunError, match=r"run\.json is missing"):
        statusview._follow(run, lambda now, *_: shown.append(now), slurm=False, wait=lambda _: None)

    assert len(shown) == 1
