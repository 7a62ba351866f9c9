"""A worker outlives errors of its filesystem: the model is loaded once, each item counts once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import WorkloadSpec
from hpc_toolkit.worker import hiccups
from tests.faults import tally
from tests.faults.cut import Commands, Cut, Going
from tests.faults.flaky import Flaky
from tests.faults.smalldisk import fill, on_disk
from tests.faults.test_damage import soaking
from tests.faults.test_faults import check_rows
from tests.toyrun import ToyRun

T = TypeVar("T")
LEASE = ("--lease", "1s")
WRITES = ("write", "fdatasync")
"""Calls that fail while other workers' files can be read, and a heartbeat be written."""


class Place:
    """A run whose workload counts its loads, and workers whose filesystem fails."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, items: int) -> None:
        self.home, self.run, self.items = home, home / "disk" / "run", items
        self.run.parent.mkdir(exist_ok=True)
        self.loads = home / "loads"
        self.loads.touch()
        monkeypatch.setenv("HPCTK_LOADS", str(self.loads))
        self.gate = home / "gate"
        self.gate.touch()
        monkeypatch.setenv("HPCTK_GATE", str(self.gate))
        self.broken = home / "broken"

    def make(self, unit: int = 25) -> None:
        workload = WorkloadSpec(function="tests.faults.loud:Loaded")
        ToyRun(self.run, self.items, unit=unit, workload=workload)

    def start(self, flaky: Flaky | None, *words: str) -> Going:
        """Start a worker, whose pauses are short."""

        def begin(_cut: Cut) -> None:
            hiccups.LONGEST_S = 0.3
            if flaky is not None:
                flaky.install()

        call = Commands(self.home, begin)
        return call.start("work", self.run, *LEASE, *words, root=self.home / "nothing is cut here")

    def breaks(self, names: tuple[str, ...] = WRITES) -> Flaky:
        """A filesystem that fails while the file ``broken`` exists."""
        return Flaky(self.run, while_exists=self.broken, names=names)

    def after_30(self, worker: Going, change: Callable[[], T]) -> T:
        """Make a change between the 30th item and the next one, which waits for the gate."""
        run = Run.open(self.run)
        worker.until(lambda: run.status().stages["items"].done >= 30)
        changed = change()
        self.gate.touch()
        return changed

    def waits(self) -> bool:
        """Whether ``hpctk status`` shows that a worker waits, and why."""
        warnings = Run.open(self.run).status().warnings
        return any("waits for the filesystem, with the model loaded: " in one for one in warnings)

    def check(self, *, loads: int) -> None:
        """Each item counts once, and no item is suspected to have killed its worker."""
        rows = check_rows(Run.open(self.run).table().rows, self.items, "")
        assert [row["value"] for row in rows] == [{"twice": 2 * n} for n in range(self.items)]
        journals = [path.read_text() for path in (self.run / "journals").glob("*.jsonl")]
        lines = [
            json.loads(line) for text in journals for line in text.split("\n") if "death" in line
        ]
        assert {line["explained"] for line in lines} <= {"drain"}
        assert len(self.loads.read_text().split()) == loads


@pytest.fixture
def place(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(fast_dir, monkeypatch, 500)


@pytest.mark.parametrize("seed", [1, *(soaking(seed) for seed in range(2, 10))])
@pytest.mark.parametrize("rate", [0.01, 0.03])
def test_a_worker_whose_filesystem_fails_now_and_then_loads_its_model_once(
    place: Place, rate: float, seed: int
) -> None:
    place.make()

    ended = place.start(Flaky(place.run, rate, seed)).end()

    assert ended.code == 0, ended
    names = len(list((place.run / "journals").glob("*.jsonl")))
    assert names > 1, "no error was met"
    place.check(loads=1)
    tally.count(f"work, {rate:.0%} of all calls fail", changes=0, cuts=names - 1)


def broken(place: Place, *words: str) -> Going:
    """A worker that has done some items, and waits for its filesystem."""
    place.items = 100
    place.make()
    place.gate.unlink()
    worker = place.start(place.breaks(), *words)
    place.after_30(worker, place.broken.touch)
    worker.until(place.waits)
    return worker


def test_a_worker_that_waits_goes_on_when_its_filesystem_answers(place: Place) -> None:
    worker = broken(place)
    time.sleep(0.5)

    place.broken.unlink()

    assert worker.end().code == 0
    place.check(loads=1)
    assert not place.waits()


def test_another_worker_does_the_items_of_one_that_waits_and_of_one_killed_then(
    place: Place,
) -> None:
    worker = broken(place)
    other = place.start(None)

    assert other.end().code == 0
    worker.kill()

    place.check(loads=2)


def test_a_worker_that_is_killed_while_it_waits_costs_nothing(place: Place) -> None:
    broken(place).kill()

    assert place.start(None).end().code == 0

    place.check(loads=2)


def test_a_request_to_drain_ends_a_worker_that_waits(place: Place) -> None:
    worker = broken(place, "--grace", "300ms")

    assert Run.open(place.run).drain() == 1

    ended = worker.end()
    assert ended.code == 75, ended
    assert f"a worker cannot write to {place.run}: " in ended.err
    place.broken.unlink()
    assert place.start(None).end().code == 0
    place.check(loads=2)


@pytest.mark.parametrize("names", [WRITES, ("open", "stat", "flock", *WRITES)])
def test_the_deadline_ends_a_worker_that_waits(place: Place, names: tuple[str, ...]) -> None:
    """Also one that could not even join the run."""
    if names == WRITES:  # a busy machine needs seconds for the first items
        worker = broken(place, "--deadline", "6s")
    else:
        place.items = 100
        place.make()
        place.broken.touch()
        worker = place.start(place.breaks(names), "--deadline", "2s")

    ended = worker.end()

    assert ended.code == 75, ended
    assert "hint: " in ended.err
    place.broken.unlink()
    assert place.start(None).end().code == 0
    place.check(loads=1 + (names == WRITES))


def check_full(place: Place) -> None:
    place.make()
    place.gate.unlink()
    worker = place.start(None)
    give_back = place.after_30(worker, partial(fill, place.run.parent, pages=0))
    worker.until(place.waits)
    time.sleep(0.5)

    give_back()

    assert worker.end().code == 0
    place.check(loads=1)


def test_a_worker_waits_until_a_full_disk_has_space_again(place: Place) -> None:
    on_disk(place.run.parent, "size=1m,nr_inodes=400", partial(check_full, place))
