"""Which deaths workers notice that each look at few others, and how many workers they count."""

from __future__ import annotations

import pytest

from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.watch import Watch
from tests.countedcalls import CountedCalls
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, ToyWorker

LEASE_S = 60.0
LOOK_S = 20.0
"""Seconds between two looks; a heartbeat comes every 10 s."""


class Crowd:
    """Workers of a run, each on a host of its own, of which all but the dead ones beat and look."""

    def __init__(self, toy: ToyRun, count: int, *, at_most: int = 1) -> None:
        self.clock = ManualClock()
        self.at_most = at_most
        self.workers: dict[str, ToyWorker] = {}
        self.watches: dict[str, Watch] = {}
        self.dead: set[str] = set()
        for number in range(count):
            name = f"n1-{number:05d}-0"
            self.workers[name] = toy.worker(name, host=name)
            liveness = Liveness(toy.paths, self.clock, host="", boot="b", lease_s=LEASE_S)
            self.watches[name] = Watch(liveness, name)

    @property
    def ring(self) -> list[str]:
        return next(iter(self.watches.values()))._ring

    def step(self) -> list[str]:
        """The living beat, look, and wait; return the deaths that were seen."""
        died = []
        for name in self.workers.keys() - self.dead:
            self.workers[name].presence.update()
        for name in sorted(self.workers.keys() - self.dead):
            died += self.watches[name].look(self.at_most)
        self.clock.advance(LOOK_S)
        return died


def test_a_look_opens_no_more_files_than_it_may(toy: ToyRun) -> None:
    (watch, *_) = Crowd(toy, 20).watches.values()

    with CountedCalls() as counted:
        watch.look(5)

    assert len(counted.opened()) == 5


def test_i3_one_look_each_shows_every_death_soon_after_the_lease(toy: ToyRun) -> None:
    crowd = Crowd(toy, 16)
    crowd.step()

    for name in sorted(crowd.workers)[::3]:
        crowd.dead.add(name)
        # The first look after the death, and a lease.
        seen = [died for _ in range(5) for died in crowd.step()]
        assert set(seen) == {name}


@pytest.mark.parametrize("count", [2, 5])
def test_i3_workers_that_die_with_the_one_that_looks_at_them_are_seen(
    toy: ToyRun, count: int
) -> None:
    crowd = Crowd(toy, 16)
    crowd.step()
    crowd.dead.update(crowd.ring[3 : 3 + count])

    # A silent neighbor is seen by the second look, which then goes on to the next one.
    seen = [died for _ in range(5 + count) for died in crowd.step()]

    assert sorted(set(seen)) == sorted(crowd.dead)


def test_a_worker_that_woke_up_is_watched_again(toy: ToyRun) -> None:
    """Slurm suspends and continues jobs."""
    crowd = Crowd(toy, 16)
    crowd.step()
    one = min(crowd.workers)
    for _ in range(2):
        crowd.dead.add(one)
        assert {died for _ in range(5) for died in crowd.step()} == {one}
        crowd.dead.clear()
        for _ in range(8):
            assert crowd.step() == []


def test_it_is_known_when_the_first_silent_worker_counts_as_dead(toy: ToyRun) -> None:
    crowd = Crowd(toy, 16)
    crowd.step()
    assert {watch.lease_left_s for watch in crowd.watches.values()} == {float("inf")}
    crowd.dead.add(min(crowd.workers))

    crowd.step()

    assert min(watch.lease_left_s for watch in crowd.watches.values()) == LEASE_S - LOOK_S


def test_silent_workers_at_random_are_looked_at_again(toy: ToyRun) -> None:
    crowd = Crowd(toy, 20)
    name, watch = min(crowd.watches.items())

    def looked() -> set[str]:
        crowd.clock.advance(1.0)
        with CountedCalls() as counted:
            watch.look(5)
        return {opened.removesuffix(".json") for opened in counted.opened()}

    first = looked()
    assert looked() == first
    one = max(first - {name, watch._ring[1]})
    crowd.workers[one].presence.update()
    assert looked() == first  # the heartbeat is seen now

    assert first - looked() == {one}
