"""When a worker looks at the run, and what all of them together ask of a shared filesystem."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, heartbeat_interval_s
from hpc_toolkit.queue.pacing import NAMES_EVERY, PER_LOOK, SCANS_PER_S, Pacing
from tests.manualclock import ManualClock

HOUR_S = 3600.0


class Waiting:
    """An idle worker: counts what it asks of the filesystem."""

    def __init__(self, clock: ManualClock, number: int, workers: int, *, local: bool) -> None:
        self.pacing = Pacing(
            clock, local=local, workers=workers, lease_s=DEFAULT_LEASE_S, seed=f"w{number}"
        )
        self.workers = workers
        self.polls = self.scans = self.scanned = 0
        self.operations = 0.0

    def step(self, owners: int) -> None:
        """Wake up once; ``owners`` workers hold units that may become free."""
        pacing = self.pacing
        if pacing.watch_due():
            at_most = self.workers if pacing.at_most is None else pacing.at_most
            self.operations += 1 + 1 / NAMES_EVERY + PER_LOOK * min(at_most, self.workers)
            pacing.watched(self.workers)
        if pacing.poll_due:
            self.polls += 1
            self.operations += 1
            pacing.polled(1)
        if pacing.scan_due():
            # The first one reads every journal.
            cost = 4 + PER_LOOK * owners + (owners if self.scans else self.workers)
            self.scans += 1
            self.operations += cost
            self.scanned += cost
            pacing.scanned(found=False, operations=cost)


def idle(workers: int, seconds: float, *, owners: int, step_s: float = 1.0) -> list[Waiting]:
    """Some workers of a run on a shared filesystem that wait so long; at most 200 are played."""
    clock = ManualClock()
    played = [Waiting(clock, n, workers, local=False) for n in range(min(workers, 200))]
    for _ in range(int(seconds / step_s)):
        for one in played:
            one.step(owners)
        clock.advance(step_s)
    return played


@pytest.mark.parametrize(("workers", "owners"), [(8, 8), (400, 10)])
def test_an_idle_run_asks_a_shared_filesystem_less_than_100_times_a_second(
    workers: int, owners: int
) -> None:
    played = idle(workers, HOUR_S, owners=owners)

    asked = sum(one.operations for one in played) / len(played) * workers
    assert asked / HOUR_S < 100


def test_4096_idle_workers_ask_no_more_than_a_few_but_for_scans() -> None:
    played = idle(4096, 4 * HOUR_S, owners=50, step_s=10.0)

    # So few may have more or less than their part of those who scan often.
    asked = sum(one.operations - one.scanned for one in played) / len(played) * 4096
    assert asked / (4 * HOUR_S) < 60


def scans_of(workers: int, owners: int, seconds: float) -> list[list[tuple[float, int]]]:
    """(When, operations) of the scans of every waiting worker, who all began to wait together."""
    clock = ManualClock()
    played = [Waiting(clock, n, workers, local=False).pacing for n in range(workers)]
    found: list[list[tuple[float, int]]] = [[] for _ in played]
    for _ in range(int(seconds / 15.0)):
        for pacing, scans in zip(played, found, strict=True):
            if pacing.scan_due():
                cost = 4 + PER_LOOK * owners + (owners if scans else workers)
                scans.append((clock.monotonic(), cost))
                pacing.scanned(found=False, operations=cost)
        clock.advance(15.0)
    return found


@pytest.mark.parametrize(("workers", "owners"), [(100, 100), (4096, 50)])
def test_scans_of_many_workers_stay_within_their_part(workers: int, owners: int) -> None:
    found = scans_of(workers, owners, HOUR_S)

    asked = sum(cost for scans in found for _, cost in scans)
    assert asked / HOUR_S < 1.1 * SCANS_PER_S


@pytest.mark.parametrize(("workers", "owners", "minutes"), [(32, 32, 5), (4096, 50, 15)])
def test_i3_a_silence_is_seen_in_minutes_however_many_wait(
    workers: int, owners: int, minutes: int
) -> None:
    """The one who sees it has looked twice, a lease apart; of one of another host, by scans alone,
    though all began to wait in the moment of the death and nobody knows anything."""
    lease_s = max(DEFAULT_LEASE_S, 3 * heartbeat_interval_s(workers))
    seen = [
        at
        for scans in scans_of(workers, owners, 60.0 * minutes)
        for at, _ in scans
        if at >= scans[0][0] + lease_s
    ]

    assert seen


def test_those_who_scan_often_change_so_that_the_dead_among_them_are_replaced() -> None:
    clock = ManualClock()
    pacing = Waiting(clock, 0, 64, local=False).pacing

    duties = set()
    for _ in range(100):
        pacing.scan_due()
        duties.add(pacing.on_duty)
        clock.advance(HOUR_S / 2)

    assert duties == {True, False}


@pytest.mark.parametrize(("workers", "looks"), [(32, 64), (4096, 8)])
def test_a_job_that_starts_again_reads_few_journals_in_all(workers: int, looks: int) -> None:
    assert Waiting(ManualClock(), 0, workers, local=False).pacing.looks_at_start == looks
    assert Waiting(ManualClock(), 0, workers, local=True).pacing.looks_at_start > 1e9


def polls_of(pacing: Pacing, clock: ManualClock, *, growing: bool) -> list[float]:
    """When a worker that ran out of items polls the log, in seconds after that."""
    pacing.worked()
    pacing.polled(1, growing=growing)
    clock.advance(5.0)  # an item
    began, polls = clock.monotonic(), list[float]()
    while clock.monotonic() - began < HOUR_S:
        if pacing.poll_due:
            polls.append(clock.monotonic() - began)
            pacing.polled(1, growing=growing)
        pacing.scan_due()
        clock.advance(0.125)
    return polls


def test_a_worker_polls_soon_after_its_last_item_and_then_at_the_rate_of_an_idle_run() -> None:
    """Of the next step of a campaign, which follows soon, a pause is a large part."""
    clock = ManualClock()
    pacing = Waiting(clock, 0, 1024, local=False).pacing

    for _ in range(2):
        polls = polls_of(pacing, clock, growing=True)

        assert polls[0] <= 1.25
        assert all(after - at <= 1.25 * max(1.0, at / 2) + 0.25 for at, after in pairwise(polls))
        assert all(after - at >= 51.2 for at, after in pairwise(polls) if at > 102.4)
        assert len(polls) < 15 + HOUR_S / 51.2
    # Nothing can follow in a sealed log.
    polls = polls_of(pacing, clock, growing=False)
    assert polls[0] >= 51.2 - 5.0
    assert len(polls) <= 2 + HOUR_S / 51.2


@pytest.mark.parametrize(("workers", "soonest_s"), [(1, 0.2), (4, 0.2), (10, 0.5), (20, 1.0)])
def test_few_workers_poll_often_for_the_next_call_and_seldom_after_a_while(
    workers: int, soonest_s: float
) -> None:
    clock = ManualClock()
    pacing = Waiting(clock, 0, workers, local=False).pacing

    polls = [at for at in polls_of(pacing, clock, growing=True) if at < 60.0]

    pauses = [after - at for at, after in pairwise(polls)]
    assert all(soonest_s <= one <= 1.25 * soonest_s + 0.25 for one in pauses[:2])
    assert all(1.0 <= one <= 1.5 for one in pauses[-10:])


def test_a_worker_looks_for_items_at_once_when_nobody_does_so_for_it_any_more() -> None:
    clock = ManualClock()
    pacing = Pacing(clock, local=False, workers=4096, lease_s=DEFAULT_LEASE_S, seed="w")
    pacing.share_looks(alone=False, others_wait_since=None)
    pacing.scan_due()
    pacing.polled(1)
    clock.advance(30.0)
    waits = not pacing.poll_due

    pacing.share_looks(alone=True, others_wait_since=None)
    looks = pacing.poll_due
    pacing.polled(1)
    pacing.share_looks(alone=True, others_wait_since=None)

    assert (waits, looks, pacing.poll_due) == (True, True, False)


def test_a_short_lease_is_watched_often_where_few_work() -> None:
    clock = ManualClock()
    pacing = Pacing(clock, local=False, workers=4, lease_s=8.0, seed="w")
    clock.advance(0.5)
    assert pacing.watch_due()
    pacing.watched(4)

    clock.advance(2.0)
    assert pacing.watch_due()
    assert pacing.at_most == 2


def test_whoever_sees_fewer_alive_looks_at_more_and_more_often() -> None:
    clock = ManualClock()
    pacing = Pacing(clock, local=False, workers=1000, lease_s=DEFAULT_LEASE_S, seed="w")
    before = pacing.at_most, pacing.watch_s
    assert pacing.watch_due() is False
    pacing.watched(1)

    assert before == (1, 1125 / 14)
    assert (pacing.at_most, pacing.watch_s) == (2, 30.0)


def test_one_worker_of_each_node_looks_at_others_as_often_as_if_there_were_no_others() -> None:
    clock = ManualClock()
    pacing = Pacing(
        clock, local=False, workers=4096, lease_s=DEFAULT_LEASE_S, seed="w", watchers=512
    )
    alone = Pacing(clock, local=False, workers=512, lease_s=DEFAULT_LEASE_S, seed="w")
    assert pacing.watch_s == alone.watch_s < 45.0
    pacing.watched(4096, watchers=512)

    assert pacing.watch_s == alone.watch_s
