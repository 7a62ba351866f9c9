"""What a worker process keeps when an error of its filesystem ends its name."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.assignment import Picker
from hpc_toolkit.queue.control import ask_to_drain
from hpc_toolkit.queue.leases import Liveness, WorkerLock, lock_is_free
from hpc_toolkit.queue.presence import DRAINING, FINISHED, RUNNING, Presence, read_presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.journal import JournalReader, encode_line
from hpc_toolkit.system.ranks import RankInfo
from hpc_toolkit.worker import hiccups
from hpc_toolkit.worker.hiccups import Continuity
from hpc_toolkit.worker.membership import Membership
from hpc_toolkit.worker.unitruns import UnitRunner
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun

EIO = OSError(errno.EIO, os.strerror(errno.EIO))


def line(item: int, kind: str = "done", worker: str = "") -> bytes:
    more = {"value": worker} if kind == "done" else {"error": worker}
    name = {"type": kind, "unit": "items/000001-0", "generation": 1, "item": item}
    return encode_line({**name, "at": 1.0, "seconds": 1.0, **more})


class Process:
    """A worker process whose names come and go; its pauses take no time."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.toy = ToyRun(root / "run", 4, unit=2)
        self.clock = ManualClock()
        self.pauses: list[float] = []
        monkeypatch.setattr(hiccups, "readable", self._pause)
        self.kept = Continuity(
            self.toy.paths, self.clock, deadline=None, grace_s=5.0, idle_exit_s=None
        )

    def _pause(self, *_fds: int, timeout_s: float) -> list[int]:
        self.clock.advance(timeout_s)
        self.pauses.append(timeout_s)
        return []

    def join(self) -> Membership:
        def make(name: str) -> Membership:
            return Membership(self.toy.paths, RankInfo(), self.clock, 30.0, name=name)

        return self.kept.join(make)

    def cannot_join(self) -> None:
        with pytest.raises(OSError, match="Input/output"):
            self.join()

    def fail(self, error: OSError = EIO) -> float:
        """Meet an error; the seconds until another name is tried."""
        self.pauses.clear()
        self.kept.wait(error, None)
        return sum(self.pauses)

    def fail_until_the_end(self) -> None:
        for _ in range(50):
            self.fail()

    def presence(self, name: str) -> Presence:
        found = read_presence(self.toy.paths.worker(name))
        assert found is not None
        return found

    def items(self, name: str) -> list[int]:
        found = JournalReader(self.toy.paths.journal(name), singly=True).poll()
        return [one.record["item"] for one in found]


@pytest.fixture
def process(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(fast_dir, monkeypatch)


def write(member: Membership, data: bytes) -> None:
    member.journal.append(data)
    member.journal.sync()


def refuse(*_: object, error: OSError = EIO) -> None:
    raise error


@contextmanager
def failing(call: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call, refuse)
        yield


@pytest.mark.parametrize("breaks", ["write", "sync", "after the write"])
def test_i1_another_name_writes_what_the_journal_of_the_former_one_lacks(
    process: Process, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    former = process.join()
    former.journal.append(line(0))
    former.journal.sync()
    real = os.write
    name, call = {
        "sync": ("fdatasync", refuse),
        "write": ("write", refuse),
        "after the write": ("write", lambda *words: refuse(real(*words))),
    }[breaks]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        with pytest.raises(OSError, match="Input/output"):
            write(former, line(1))
    process.fail()
    with pytest.raises(OSError, match="Bad file"):
        former.journal.append(line(2))

    name = process.join().name

    assert name == f"{former.name}.0002"
    assert process.items(name) == [1]
    assert process.items(former.name) == ([0] if breaks == "write" else [0, 1])


def test_i1_lines_are_carried_on_until_a_name_could_write_them(process: Process) -> None:
    former = process.join()
    former.journal.unsynced.append(line(1))
    process.fail()
    for _ in range(2):
        with failing("os.fdatasync"):
            process.cannot_join()
        process.fail()

    assert process.items(process.join().name) == [1]


def test_i3_the_former_names_have_finished_before_another_one_claims(process: Process) -> None:
    former = process.join()
    process.fail()
    waiting = process.presence(former.name)
    assert (waiting.state, waiting.heartbeat) == (DRAINING, 0)
    assert waiting.note == "waiting: Input/output error"
    assert lock_is_free(process.toy.paths, former.name)

    with failing("hpc_toolkit.worker.membership.Membership.end"):
        process.cannot_join()
    process.fail()
    last = process.join().name

    assert process.presence(last).state == RUNNING
    assert not lock_is_free(process.toy.paths, last)
    others = [process.presence(name).state for name in process.kept.names[:-1]]
    assert others == [FINISHED, FINISHED]


def test_i3_a_lock_is_held_until_others_can_see_that_no_item_is_to_blame(process: Process) -> None:
    """A free lock of a worker that seems to run would be a death, of which an item is suspected."""
    name = process.join().name
    with failing("os.pwrite"):
        process.fail()
        assert not lock_is_free(process.toy.paths, name)
        process.cannot_join()
    process.fail()

    assert process.presence(name).state in {DRAINING, FINISHED}
    assert lock_is_free(process.toy.paths, name)


def test_pauses_grow_over_all_names_until_a_result_is_committed(process: Process) -> None:
    pauses = []
    for _ in range(30):
        process.join()
        pauses.append(process.fail())
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(hiccups.FIRST_S)
    assert pauses[-1] == pytest.approx(hiccups.LONGEST_S)

    member = process.join()
    member.journal.append(line(0))
    member.journal.sync()

    assert process.fail() == pytest.approx(hiccups.FIRST_S)


def test_rare_errors_during_a_long_item_do_not_count_as_idle_time(process: Process) -> None:
    """The second one would end the worker, and hours of an item with it."""
    process.kept = Continuity(
        process.toy.paths, process.clock, deadline=None, grace_s=5.0, idle_exit_s=600.0
    )
    stub = SimpleNamespace(held=("items", "000001-0"), is_answered=True, stop=lambda: None)
    process.kept._runner = cast("UnitRunner", stub)
    for _ in range(5):
        process.join()
        process.clock.advance(7200.0)

        assert process.fail() == pytest.approx(hiccups.FIRST_S)


def test_a_worker_whose_standard_error_is_on_the_full_disk_waits(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    process.join()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "write", partial(refuse, error=no_space))

    process.fail_until_the_end()


def test_a_name_that_cannot_be_made_leaves_no_worker_behind(process: Process) -> None:
    with failing("hpc_toolkit.worker.membership.JournalWriter"):
        process.cannot_join()
    assert process.fail() > 0
    assert os.listdir(process.toy.paths.workers) == []

    assert process.join().name == process.kept.names[1]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOENT, errno.ESHUTDOWN])
def test_an_error_that_does_not_pass_ends_the_worker_at_once(process: Process, code: int) -> None:
    member = process.join()

    with pytest.raises(RunError, match="cannot write to"):
        process.fail(OSError(code, os.strerror(code)))

    assert process.presence(member.name).note.startswith("gave up: ")


@pytest.mark.parametrize("by_file", [True, False])
@pytest.mark.parametrize("has_results", [False, True])
def test_a_request_to_exit_ends_the_wait_and_leaves_results_the_grace_period(
    process: Process, by_file: bool, has_results: bool
) -> None:
    member = process.join()
    if has_results:
        member.journal.unsynced.append(line(1))
    if by_file:
        ask_to_drain(process.toy.paths, [member.name])
    else:
        process.kept.drain.request("got SIGTERM", 5.0)
    since = process.clock.monotonic()

    with pytest.raises(RunError, match="cannot write to"):
        process.fail_until_the_end()

    waited_s = process.clock.monotonic() - since
    assert (waited_s >= 5.0) == has_results


def test_i1_results_in_memory_are_tried_once_more_at_the_deadline(process: Process) -> None:
    """The filesystem may have answered since a pause of half a minute began."""
    process.kept.drain.deadline = process.clock.monotonic() + 100.0
    process.join().journal.unsynced.append(line(1))
    while not process.kept.drain.requested:
        process.fail()
    now = process.clock.monotonic()

    assert now - process.kept.drain.deadline < 2.0
    with pytest.raises(RunError, match="cannot write to"):
        process.fail()
    assert process.clock.monotonic() == now


def test_names_that_cannot_write_hold_no_descriptors(process: Process) -> None:
    process.join().journal.unsynced.append(line(1))
    process.fail()
    before = os.listdir("/proc/self/fd")
    with failing("os.fdatasync"):
        for _ in range(50):
            process.cannot_join()
            process.fail()

    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_name_finds_what_a_former_one_wrote_however_many_wrote_nothing(process: Process) -> None:
    first = process.join()
    paths, manifest = process.toy.paths, process.toy.run.manifest
    assert process.toy.view().stages["items"].claims.create("000001-0", 1, first.name)
    first.journal.unsynced += [line(0), line(1)]
    process.fail()
    process.join()
    process.fail()
    with failing("hpc_toolkit.worker.membership.JournalWriter"):
        for _ in range(60):
            process.cannot_join()
            process.fail()
    last = process.join().name

    liveness = Liveness(paths, process.clock, host="h", boot="b", lease_s=30.0)
    picker = Picker(RunView(paths, manifest), liveness, process.clock, last)

    assert picker.take_back("items", "000001-0", process.kept.wrote) is None


def test_i4_a_lock_that_may_be_held_later_is_not_given_up(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free lock would show others a death of a worker that lives."""
    path = fast_dir / "w.lock"
    with failing("fcntl.flock"), pytest.raises(OSError, match="Input/output"):
        WorkerLock(path)

    with monkeypatch.context() as patch:
        no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        patch.setattr(fcntl, "flock", partial(refuse, error=no_locks))
        WorkerLock(path).close()
    # An NFS server may run out of locks for one call, and answer the next test.
    assert not path.exists()


@pytest.mark.parametrize("kind", ["done", "failed", "permanent"])
@pytest.mark.parametrize("first", ["w", "w.0002"])
def test_of_a_line_that_two_names_wrote_the_one_of_the_older_name_counts(
    fast_dir: Path, kind: str, first: str
) -> None:
    toy = ToyRun(fast_dir / "run", 2, unit=2, max_attempts=2)
    names = [first, *({"w", "w.0002"} - {first})]
    view = toy.view()
    view.poll()
    for name in names:
        toy.worker(name).journal.append(line(0, kind, name))
        view.poll_journal(name)

    history = view.stages["items"].state.units["000001-0"].histories[0]

    assert history.attempts(0) == (kind != "done")
    found = history.done if kind == "done" else history.failures[1]
    assert found is not None
    assert found.worker == "w"


def test_all_names_of_a_process_share_a_log_and_a_value_file(fast_dir: Path) -> None:
    paths = ToyRun(fast_dir / "run", 1).paths

    assert paths.worker_log("n1-7-abc.0002") == paths.worker_log("n1-7-abc")
    assert paths.values("n1-7-abc.0002") == paths.values("n1-7-abc")
    assert paths.journal("n1-7-abc.0002") != paths.journal("n1-7-abc")
