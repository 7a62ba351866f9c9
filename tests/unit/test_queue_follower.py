"""What the coordinator reads while it waits for a few units among many workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.queue.view import Follower, StageView
from tests.toyrun import ToyRun, ToyWorker

CROWD = 200


class Waiting:
    """A process that waits for units of a run of many workers, of whom seven hold one each."""

    def __init__(self, root: Path, *, local: bool = False) -> None:
        self.toy = ToyRun(root / "r", 14, unit=2)
        view = self.toy.view()
        self.stage: StageView = view.stages["items"]
        self.follower = Follower(view, local=local)
        self.workers: list[ToyWorker] = []
        for number in range(CROWD):
            worker = self.toy.worker(f"w{number:03d}")
            # Those whose turn comes last hold the units.
            if number >= CROWD - 7:
                worker.claim(self.unit(number))
                self.workers.append(worker)
        self.units = [self.unit(CROWD - 7 + number) for number in range(7)]

    def unit(self, number: int) -> str:
        return self.toy.unit_name(2 * (number - CROWD + 7))

    def look(self, waited_s: float = 60.0) -> float:
        return self.follower.look(self.stage, self.units, waited_s)

    @property
    def left(self) -> int:
        return len(self.stage.state.open)


def finish(worker: ToyWorker, *, tell: bool = True) -> None:
    first = int(worker.unit.rpartition("-")[2])
    worker.attempt(first)
    worker.attempt(first + 1)
    worker.release()
    if tell:
        worker.presence.update(done=2, journal=worker.journal.size)


@pytest.fixture
def waiting(fast_dir: Path) -> Waiting:
    return Waiting(fast_dir)


def test_results_of_the_units_that_are_waited_for_are_seen_by_the_next_look(
    waiting: Waiting,
) -> None:
    waiting.look()
    for number, worker in enumerate(waiting.workers):
        finish(worker)
        assert waiting.look() <= 1.5
        assert waiting.left == 6 - number


def test_results_of_a_short_wait_are_seen_soon_and_before_their_heartbeat(waiting: Waiting) -> None:
    waiting.look(0.0)
    for number, worker in enumerate(waiting.workers):
        finish(worker, tell=False)
        assert waiting.look(0.9) <= 0.6
        assert waiting.left == 6 - number

    assert waiting.look(0.9) == 0.25
    assert waiting.look(0.1) == 0.1
    assert waiting.look(0.0) == 0.05


class Crowd:
    """A process that waits for 250 units, each of which another worker holds."""

    def __init__(self, root: Path) -> None:
        toy = ToyRun(root / "r", 250, unit=1)
        self.workers = [toy.worker(f"w{number:03d}") for number in range(250)]
        for number, worker in enumerate(self.workers):
            worker.claim(toy.unit_name(number))
        view = toy.view()
        self.stage: StageView = view.stages["items"]
        self._follower = Follower(view, local=False)
        self._follower.look(self.stage, self.stage.state.open)

    def look(self, waited_s: float) -> float:
        return self._follower.look(self.stage, self.stage.state.open, waited_s)


def test_holders_who_are_ready_are_all_seen_by_one_look(fast_dir: Path) -> None:
    crowd = Crowd(fast_dir)
    for number, worker in enumerate(crowd.workers):
        worker.attempt(number)
        worker.release()
        worker.presence.update(done=1, journal=worker.journal.size)

    assert crowd.look(3600.0) == 1.0
    assert not crowd.stage.state.open


@pytest.mark.parametrize("waited_s", [0.0, 60.0])
def test_results_that_nobody_told_of_are_seen_in_the_end(waiting: Waiting, waited_s: float) -> None:
    """A worker that died told of less than it wrote; here its claims are not seen either."""
    for _ in range(3):
        waiting.look()
    for worker in waiting.workers:
        finish(worker, tell=False)

    seconds = 0.0
    while waiting.left and seconds < 1e3:
        seconds += waiting.follower.look(waiting.stage, [], waited_s)

    assert not waiting.left
    assert seconds < 2 * CROWD / 4
