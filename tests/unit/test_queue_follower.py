"""What the coordinator reads while it waits for a few units among many workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.queue.pacing import LOOK_LOCAL_S, READINGS_PER_S
from hpc_toolkit.queue.view import Follower, StageView
from tests.countedcalls import CountedCalls
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


def test_results_of_a_short_wait_are_seen_soon_and_before_their_heartbeat(
    waiting: Waiting,
) -> None:
    waiting.look(0.0)
    for number, worker in enumerate(waiting.workers):
        finish(worker, tell=False)
        assert waiting.look(0.9) <= 0.6
        assert waiting.left == 6 - number

    assert waiting.look(0.9) == 0.25


@pytest.mark.parametrize("waited_s", [0.5, 60.0])
def test_a_second_of_waiting_asks_for_no_more_than_its_part(
    waiting: Waiting, waited_s: float
) -> None:
    waiting.look()
    seconds = 0.0
    with CountedCalls() as counted:
        for _ in range(30):
            for worker in waiting.workers:
                worker.presence.update()
            seconds += waiting.look(waited_s)
        for worker in waiting.workers:
            finish(worker)
            seconds += waiting.look(waited_s)

    assert len(counted.calls) <= 1.1 * READINGS_PER_S * seconds


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


@pytest.mark.parametrize(("waited_s", "per_s"), [(8.0, 250), (40.0, 50), (3600.0, 20)])
def test_a_round_of_all_holders_takes_a_quarter_of_the_wait_or_the_usual_rate(
    fast_dir: Path, waited_s: float, per_s: int
) -> None:
    crowd = Crowd(fast_dir)
    seconds, wanted = 0.0, {f"{worker.name}.json" for worker in crowd.workers}
    with CountedCalls() as counted:
        while not wanted <= set(counted.opened()):
            seconds += crowd.look(waited_s)

    # Each claim is read once as well.
    assert len(counted.calls) - len(crowd.workers) <= 1.2 * seconds * per_s
    assert seconds <= 1.4 * 2 * len(crowd.workers) / per_s


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


def test_on_a_filesystem_of_this_machine_everything_is_read_at_short_times(fast_dir: Path) -> None:
    waiting = Waiting(fast_dir, local=True)
    waiting.look()
    for worker in waiting.workers:
        finish(worker, tell=False)

    assert waiting.look() <= LOOK_LOCAL_S
    assert not waiting.left


def test_here_short_waits_are_looked_at_more_often_than_long_ones(fast_dir: Path) -> None:
    waiting = Waiting(fast_dir, local=True)

    def pause_s(waited_s: float) -> float:
        return waiting.follower.look(waiting.stage, waiting.units, waited_s)

    assert pause_s(0.0) == 0.002
    assert pause_s(0.06) == 0.015
    assert pause_s(600.0) == LOOK_LOCAL_S
