"""Waiting workers: when they look at a run, what they read, what all ask of the filesystem."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, Liveness, heartbeat_interval_s
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.pacing import NAMES_EVERY, PER_LOOK, SCANS_PER_S, Pacing
from hpc_toolkit.queue.view import Follower, StageView
from tests.manualclock import ManualClock
from tests.replacedcalls import CountedCalls, Unreadable
from tests.toyrun import ToyRun, ToyWorker

LEASE_S = 60.0
NOTHING = ("", None)


class Idler:
    """A worker of another host, on a shared filesystem."""

    def __init__(self, toy: ToyRun, name: str = "idler", *, waits: bool = True) -> None:
        self.clock = ManualClock()
        self.view = toy.view()
        self.liveness = Liveness(toy.paths, self.clock, host="elsewhere", boot="b", lease_s=LEASE_S)
        self.worker = toy.worker(name)
        self.picker = Picker(self.view, self.liveness, self.clock, name, shared=True)
        if waits:
            assert self.picker.fresh(NOTHING) is None
            self.scan()

    def scan(self) -> tuple[str, int] | None:
        found = self.picker.takeover()
        return None if found is None else (found.unit.name, found.generation)


Busy = tuple[ToyRun, list[ToyWorker]]
Drained = tuple[ToyRun, Idler]
Released = tuple[ToyRun, ToyWorker, Idler]


def told(of: Picker | StageLog) -> bool:
    return of.reported_complete


@pytest.fixture
def busy(fast_dir: Path) -> Busy:
    """Six workers, of which two hold a unit each; the others finished theirs and wait."""
    toy = ToyRun(fast_dir / "r", 12, unit=2)
    workers = [toy.worker(f"w{number}") for number in range(6)]
    for number, worker in enumerate(workers):
        first = 2 * number
        if number < 4:
            worker.work(toy.unit_name(first), 1, **{f"i{first}": "done", f"i{first + 1}": "done"})
        else:
            worker.claim(toy.unit_name(first))
    return toy, workers


def finish_units(workers: list[ToyWorker]) -> None:
    """The two that are :func:`busy` do what they hold."""
    for worker, first in ((workers[4], 8), (workers[5], 10)):
        worker.attempt(first)
        worker.attempt(first + 1)
        worker.release()


@pytest.fixture
def drained(fast_dir: Path) -> Drained:
    """An open list whose one item is done, and a worker that waits for more."""
    toy = ToyRun(fast_dir / "r", 1, unit=1, sealed=False)
    toy.worker("w").work(toy.unit_name(0), i0="done")
    return toy, Idler(toy)


def test_a_look_for_new_items_opens_head_once_and_nothing_else(drained: Drained) -> None:
    _, idler = drained

    with CountedCalls() as counted:
        assert idler.picker.fresh(NOTHING) is None

    assert counted.calls == [("open", "head")]
    assert idler.picker.polled == 1


def test_a_scan_reads_the_files_of_those_who_hold_open_units_alone(busy: Busy) -> None:
    toy, workers = busy
    idler = Idler(toy)
    idler.scan()
    idler.scan()
    workers[4].presence.update(done=1)

    with CountedCalls() as counted:
        assert idler.scan() is None

    assert counted.opened() == ["head", "w4.json", "w4.jsonl", "w5.json"]
    assert [name for call, name in counted.calls if call == "listdir"] == ["claims"]
    # The log is asked for as well: a name is looked up and found missing.
    assert len(counted.calls) == 6


def test_results_behind_unchanged_counters_are_seen_in_the_end(busy: Busy) -> None:
    """Whatever is missed: from time to time everything is read."""
    toy, workers = busy
    idler = Idler(toy)
    for _ in range(3):
        idler.scan()
    finish_units(workers)

    complete = []
    for _ in range(16):
        complete.append(idler.view.complete)
        assert idler.scan() is None

    assert complete[:2] == [False, False]
    assert idler.view.complete


def test_a_scan_goes_on_past_a_journal_that_cannot_be_read(busy: Busy) -> None:
    toy, workers = busy
    for worker, item in ((workers[4], 8), (workers[5], 10)):
        worker.attempt(item, "failed")
        worker.release()

    with Unreadable(toy.paths.journal("w4"), errno.EIO):
        assert Idler(toy, waits=False).scan() == (toy.unit_name(10), 2)


@pytest.fixture
def released(fast_dir: Path) -> Released:
    """A unit that its owner did and released, and a worker that saw nothing of it yet."""
    toy = ToyRun(fast_dir / "r", 2, unit=2)
    owner = toy.worker("owner")
    owner.claim(toy.unit_name(0))
    idler = Idler(toy)
    for item in (0, 1):
        owner.attempt(item)
    owner.release()
    return toy, owner, idler


class OldCopy:
    """While inside, a journal shows no more than its first bytes, as a mount may that remembers how
    long a file was."""

    def __init__(self, worker: ToyWorker, size: int) -> None:
        self._path = worker.paths.journal(worker.name)
        self._size = size

    def __enter__(self) -> None:
        self._whole = self._path.read_bytes()
        self._path.write_bytes(self._whole[: self._size])

    def __exit__(self, *_: object) -> None:
        self._path.write_bytes(self._whole)


@pytest.mark.parametrize("by", ["its end", "its last heartbeat"])
def test_results_that_an_owner_told_of_are_waited_for_and_not_made_again(
    released: Released, by: str
) -> None:
    _, owner, idler = released
    with OldCopy(owner, 30):
        if by == "its end":
            owner.finish()
        else:
            owner.presence.update(done=2, journal=owner.journal.size)
            idler.scan()
            idler.clock.advance(LEASE_S + 1)
        assert idler.scan() is None
        idler.clock.advance(LEASE_S - 1)
        assert idler.scan() is None

    assert idler.scan() is None
    assert idler.view.complete


def test_i3_results_that_were_lost_with_their_host_are_made_again_after_the_lease(
    released: Released,
) -> None:
    toy, owner, idler = released
    owner.finish()
    with OldCopy(owner, 0):
        assert idler.scan() is None
        idler.clock.advance(LEASE_S + 1)

        assert idler.scan() == (toy.unit_name(0), 2)


def test_a_worker_that_hears_of_completeness_needs_no_journal(busy: Busy) -> None:
    toy, workers = busy
    idler = Idler(toy)
    finish_units(workers)
    assert not told(idler.picker)

    toy.stage().log.report_complete()
    with CountedCalls() as counted:
        assert idler.picker.fresh(NOTHING) is None
        assert told(idler.picker)

    assert counted.calls == [("open", "head")]
    assert not idler.view.complete  # its own view is as old as it was


def test_a_word_of_completeness_holds_until_the_log_grows(fast_dir: Path) -> None:
    toy = ToyRun(fast_dir / "r", 1, unit=1, max_attempts=1)
    early = toy.log()
    toy.worker("w").work(toy.unit_name(0), i0="failed")
    toy.log().report_complete()
    assert not early.poll()
    assert told(early)

    toy.reopen().retry()

    assert early.poll()
    assert not told(early)
    assert early.hint() == 3


CROWD = 200


class Waiting:
    """A process that waits for units of a run of many workers, of whom some hold one each."""

    def __init__(self, root: Path, *, workers: int = CROWD, holders: int = 7) -> None:
        toy = ToyRun(root / "r", 2 * holders, unit=2)
        view = toy.view()
        self.stage: StageView = view.stages["items"]
        self.follower = Follower(view, local=False)
        # Those whose turn comes last hold the units.
        self.workers = [toy.worker(f"w{number:03d}") for number in range(workers)][-holders:]
        self.units = [toy.unit_name(2 * number) for number in range(holders)]
        for worker, unit in zip(self.workers, self.units, strict=True):
            worker.claim(unit)

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


def test_holders_who_are_ready_are_all_seen_by_one_look(fast_dir: Path) -> None:
    waiting = Waiting(fast_dir, workers=250, holders=250)
    waiting.look()
    for worker in waiting.workers:
        finish(worker)

    assert waiting.look(3600.0) == 1.0
    assert not waiting.left


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


HOUR_S = 3600.0


class Paced:
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


def idle(workers: int, seconds: float, *, owners: int, step_s: float = 1.0) -> list[Paced]:
    """Some workers of a run on a shared filesystem that wait so long; at most 200 are played."""
    clock = ManualClock()
    played = [Paced(clock, n, workers, local=False) for n in range(min(workers, 200))]
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
    played = [Paced(clock, n, workers, local=False).pacing for n in range(workers)]
    found: list[list[tuple[float, int]]] = [[] for _ in played]
    for _ in range(int(seconds / 15.0)):
        for pacing, scans in zip(played, found, strict=True):
            if pacing.scan_due():
                cost = 4 + PER_LOOK * owners + (owners if scans else workers)
                scans.append((clock.monotonic(), cost))
                pacing.scanned(found=False, operations=cost)
        clock.advance(15.0)
    return found


@pytest.mark.parametrize(("workers", "owners", "minutes"), [(32, 32, 5), (4096, 50, 15)])
def test_i3_a_silence_is_seen_in_minutes_and_scans_stay_within_their_part_however_many_wait(
    workers: int, owners: int, minutes: int
) -> None:
    """The one who sees it has looked twice, a lease apart; of one of another host, by scans alone,
    though all began to wait in the moment of the death and nobody knows anything."""
    lease_s = max(DEFAULT_LEASE_S, 3 * heartbeat_interval_s(workers))

    found = scans_of(workers, owners, HOUR_S)

    soon = [[at for at, _ in scans if at < ManualClock().now + 60.0 * minutes] for scans in found]
    assert any(at >= scans[0] + lease_s for scans in soon for at in scans)
    asked = sum(cost for scans in found for _, cost in scans)
    assert asked / HOUR_S < 1.1 * SCANS_PER_S


def test_those_who_scan_often_change_so_that_the_dead_among_them_are_replaced() -> None:
    clock = ManualClock()
    pacing = Paced(clock, 0, 64, local=False).pacing

    duties = set()
    for _ in range(100):
        pacing.scan_due()
        duties.add(pacing.on_duty)
        clock.advance(HOUR_S / 2)

    assert duties == {True, False}


@pytest.mark.parametrize(("workers", "looks"), [(32, 64), (4096, 8)])
def test_a_job_that_starts_again_reads_few_journals_in_all(workers: int, looks: int) -> None:
    assert Paced(ManualClock(), 0, workers, local=False).pacing.looks_at_start == looks
    assert Paced(ManualClock(), 0, workers, local=True).pacing.looks_at_start > 1e9


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
    pacing = Paced(clock, 0, 1024, local=False).pacing

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
    pacing = Paced(clock, 0, workers, local=False).pacing

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
