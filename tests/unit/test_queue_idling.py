"""What a worker that waits on a shared filesystem asks of it, and what it finds all the same."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.log import StageLog
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
    workers[4].attempt(8, "failed")
    workers[4].release()
    workers[5].attempt(10, "failed")
    workers[5].release()

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
