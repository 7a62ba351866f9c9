"""What a process sees of a run when a file cannot be read (I8), or its server does not answer."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from hpc_toolkit.queue import log as queue_log
from hpc_toolkit.queue.leases import Liveness
from hpc_toolkit.queue.presence import (
    JOURNAL,
    LOCK,
    PRESENCE,
    Presence,
    PresenceFile,
    Probes,
    ProbeTimeoutError,
)
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.gather import gather
from hpc_toolkit.results.status import read_status
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalReader
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.clock import SystemClock
from tests.manualclock import ManualClock
from tests.replacedcalls import Unreadable
from tests.toyrun import ToyRun


def done(view: RunView) -> int:
    return read_status(view, ManualClock(), given="r").stages["items"].done


@pytest.fixture
def two(fast_dir: Path) -> ToyRun:
    """Two workers finished a unit each."""
    toy = ToyRun(fast_dir / "r", 4, unit=2)
    toy.worker("a").work(toy.unit_name(0), i0="done", i1="done")
    toy.worker("b").work(toy.unit_name(2), i2="done", i3="done")
    return toy


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_i8_a_journal_that_cannot_be_read_is_skipped_and_named_and_the_others_count(
    two: ToyRun, number: int
) -> None:
    path = two.paths.journal("a")
    with Unreadable(path, number):
        view = two.view()

        assert done(view) == 2
        assert read_status(view, ManualClock(), given="r").warnings == [
            f"{path}: cannot be read ({os.strerror(number)}); what it says is not counted"
        ]
        assert list(view.unreadable) == ["a"]
        assert not view.complete
    assert done(view) == 4
    assert view.unreadable == {}


def test_status_shows_the_failures_of_a_journal_that_became_unreadable(toy: ToyRun) -> None:
    toy.worker("w").work(toy.unit_name(0), i0="failed", i1="done", i2="done", i3="done")
    view = toy.view()

    with Unreadable(toy.paths.journal("w"), errno.EIO):
        (found,) = read_status(view, ManualClock(), given="r").failures or [{}]

    assert found["retrying"] == 1


def test_i2_no_table_is_published_while_a_journal_cannot_be_read(two: ToyRun) -> None:
    two.worker("c").work(two.unit_name(0), 2, i0="done", i1="done")

    with Unreadable(two.paths.journal("a"), errno.EIO):
        with pytest.raises(OSError, match=r"a\.jsonl"):
            gather(two.view(), "items")
        found = gather(two.view(), "items", partial=True)

    assert not found.published
    assert {row["worker"] for row in found.rows} == {"b", "c"}
    assert gather(two.view(), "items").published


def test_a_published_table_needs_no_journal(two: ToyRun) -> None:
    rows = two.rows()

    with Unreadable(two.paths.journal("a"), errno.EIO):
        assert gather(two.view(), "items").rows == rows


def test_i5_a_clean_pass_is_kept_when_its_journal_cannot_be_read_again(two: ToyRun) -> None:
    """A second source speaks of the unit, whose lines must be read one by one now."""
    view = two.view()
    late = two.worker("late")
    late.claim(two.unit_name(0), 2)
    late.attempt(0)

    with Unreadable(two.paths.journal("a"), errno.EIO):
        view.poll()

        assert view.complete
        assert done(view) == 4
        assert len(read_status(view, ManualClock(), given="r").warnings) == 1
    assert read_status(view, ManualClock(), given="r").stages["items"].duplicates == 1
    assert view.unreadable == {}


def test_i8_a_line_is_counted_once_when_the_one_behind_it_could_not_be_taken_in(
    two: ToyRun,
) -> None:
    view = two.view()
    late = two.worker("late")
    late.begin(two.unit_name(2), 2)
    late.attempt(2)
    late.begin(two.unit_name(0), 2)
    late.attempt(0)

    with Unreadable(two.paths.journal("a"), errno.EIO):
        view.poll()
        view.poll()
    view.poll()

    assert read_status(view, ManualClock(), given="r").stages["items"].duplicates == 2


LIMIT_S = 0.2
HANGS_S = 60.0
"""A look that waited for its answer would take longer than this, for ever."""


class Hanging:
    """A file that cannot be opened for reading before :meth:`answer`."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        self.path = path
        self.opened = 0

    def open(self) -> bytes:
        self.opened += 1
        with self.path.open("rb") as file:
            return file.read()

    def answer(self, data: bytes = b"answer") -> None:
        with self.path.open("wb") as file:
            file.write(data)


@pytest.fixture
def hanging(tmp_path: Path) -> Hanging:
    return Hanging(tmp_path / "fifo")


def test_a_look_without_an_answer_ends_and_its_answer_comes_with_the_next_one(
    hanging: Hanging,
) -> None:
    probes = Probes(LIMIT_S)
    for _ in range(3):
        with pytest.raises(ProbeTimeoutError, match="not answered for the journal of a-1-x"):
            probes.look(JOURNAL, "a-1-x", hanging.open)

    hanging.answer()
    probes.wait()

    assert probes.look(JOURNAL, "a-1-x", hanging.open) == b"answer"
    assert hanging.opened == 1


def test_a_host_that_hangs_costs_one_wait_and_spares_locks_and_other_hosts(
    hanging: Hanging,
) -> None:
    probes = Probes(LIMIT_S)
    with pytest.raises(ProbeTimeoutError):
        probes.look(PRESENCE, "node-a-1-x", hanging.open)

    began = time.monotonic()
    for number in range(2, 1000):
        with pytest.raises(ProbeTimeoutError, match="another journal of this host"):
            probes.look(JOURNAL, f"node-a-{number}-x", hanging.open)
    refused_s = time.monotonic() - began

    assert probes.look(LOCK, "node-a-1-x", lambda: "lock") == "lock"
    assert probes.look(PRESENCE, "node-b-1-x", lambda: "file") == "file"
    assert (hanging.opened, refused_s < 998 * LIMIT_S) == (1, True)
    hanging.answer()
    probes.wait()
    assert probes.look(JOURNAL, "node-a-2-x", lambda: "file") == "file"


def test_f1_the_lock_of_a_lost_host_that_hangs_keeps_nobody_from_working(paths: RunPaths) -> None:
    """Its server waits for the host before it lets others open the file."""
    fields = {"host": "lost", "boot": "there", "pid": 1, "rank": 0, "job": None, "interval_s": 0.0}
    PresenceFile(paths.worker("lost-1-x"), Presence(worker="lost-1-x", **fields))  # type: ignore[arg-type]
    Hanging(paths.worker_lock("lost-1-x"))
    observer = Liveness(
        paths,
        SystemClock(),
        host="here",
        boot="boot",
        lease_s=HANGS_S,
        locks_proven=True,
        probes=Probes(LIMIT_S),
    )
    began = time.monotonic()
    observer.verdict("lost-1-x")

    assert observer.verdict("lost-1-x").alive
    assert time.monotonic() - began < HANGS_S


class Gated(JournalReader):
    """Opens its journal when the gate is open."""

    gate = threading.Event()

    def open(self) -> int:
        self.gate.wait()
        return super().open()


def test_a_journal_that_hangs_counts_as_shorter_until_it_answers(toy: ToyRun) -> None:
    lost = toy.worker("lost")
    lost.claim(toy.unit_name(0))
    lost.attempt(0)
    view = RunView(toy.paths, toy.run.manifest, limit_s=LIMIT_S)
    view.readers["lost"] = Gated(toy.paths.journal("lost"))

    view.poll()
    assert isinstance(view.unreadable["lost"], ProbeTimeoutError)
    assert view.read_size("lost") == -1

    Gated.gate.set()
    view.await_journals()
    assert view.unreadable == {}
    assert view.read_size("lost") == toy.paths.journal("lost").stat().st_size


@pytest.mark.parametrize("limit_s", [LIMIT_S, None], ids=["worker", "command"])
def test_an_entry_is_added_while_the_head_of_its_log_hangs(
    toy: ToyRun, monkeypatch: pytest.MonkeyPatch, limit_s: float | None
) -> None:
    """Others find it by listing the log; a write that waits is made when the server answers."""
    monkeypatch.setattr(queue_log, "_HEAD_S", 0.1)
    monkeypatch.setenv("HPCTK_FILESYSTEM", "shared")
    view = RunView(toy.paths, toy.run.manifest, limit_s=limit_s)
    log = view.stages["items"].log
    log.poll()
    answers, write = threading.Event(), files.write_at
    monkeypatch.setattr(files, "write_at", lambda *words: answers.wait() and write(*words))

    assert log.append("retries/none.json")
    assert toy.stage_paths.entry(log.length + 1).is_symlink()
    assert log.hint() == log.length

    answers.set()
    (log._patient if limit_s is None else view.probes).wait()
    assert log.hint() == log.length + 1
