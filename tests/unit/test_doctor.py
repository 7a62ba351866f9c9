"""Examinations with two real processes, on directories whose filesystem is played by the test."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit import doctor
from hpc_toolkit.doctor import filesystem, locks, sides
from hpc_toolkit.doctor.sides import Finding, Report, Verdict
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.trust import Mount
from tests.manualclock import ManualClock
from tests.toyrun import ToyRun, tree

SETTLED = [
    *("filesystem", "mount options", "space", "sides", "exclusive names"),
    *(f"delay ({name})" for name in filesystem.looks(Path())),
    *("locks (flock)", "fsync"),
]


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough of everything to be right, not to be measured."""
    monkeypatch.setattr(filesystem, "_MOST_SYNCS", 3)
    monkeypatch.setattr(doctor, "ARRIVAL_S", 10.0)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process stands for a host of its own."""
    monkeypatch.setattr(sides, "boot_id", lambda: "lead" if os.getpid() == LEAD else "other")


def looked_at(directory: Path, **words: Any) -> Report:
    return doctor.examine(directory, ManualClock(), **words)


def found(report: Report) -> dict[str, Finding]:
    return {finding.check: finding for finding in report.findings}


def test_a_local_directory_is_fine_and_is_left_empty(fast_dir: Path) -> None:
    report = looked_at(fast_dir)

    assert [name for name in SETTLED if name not in found(report)] == []
    assert {one.check: one.verdict for one in report.findings if one.verdict != "fine"} == {}
    assert (report.apart, report.locks_proven) == (False, False)
    assert os.listdir(fast_dir) == []


LEAD, TRY_LOCK = os.getpid(), locks.try_lock


def not_implemented(_path: str) -> bool:
    raise OSError(errno.ENOSYS, "Function not implemented")


def keeps_out_one_side(path: Path) -> str:
    return TRY_LOCK(path) if os.getpid() == LEAD else locks.GRANTED


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("call", "answer", "words"),
    [
        ("take_lock", lambda _path: True, "granted to both sides at once"),
        ("take_lock", not_implemented, "not possible here: Function not implemented"),
        ("take_lock", lambda _path: False, "refused though nobody held it"),
        ("try_lock", keeps_out_one_side, "granted to both sides at once"),
        ("_time_until_free", lambda _path: None, "still held"),
    ],
)
def test_locks_that_fail_one_side_or_both_are_slower_and_prove_nothing(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str, answer: Any, words: str
) -> None:
    monkeypatch.setattr(locks, call, answer)

    report = looked_at(fast_dir, other=fast_dir)

    flock = found(report)["locks (flock)"]
    assert flock.verdict is report.verdict is Verdict.SLOWER
    assert words in flock.found
    assert "lease" in flock.means
    assert not report.locks_proven


def test_a_lock_request_that_hangs_is_given_up_and_unsafe(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_ANSWER_S", 0.05)
    monkeypatch.setattr(locks, "take_lock", lambda _path: time.sleep(60))

    report = looked_at(fast_dir)

    assert found(report)["locks (flock)"].verdict is Verdict.UNSAFE


@pytest.fixture
def on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    mount = Mount("/scratch", "nfs", "nas:/scratch", ("rw", "vers=3"))
    monkeypatch.setattr(doctor, "mount_of", lambda _path: mount)
    monkeypatch.setattr(sides, "mount_of", lambda _path: mount)


@pytest.mark.usefixtures("on_nfs")
def test_locks_in_the_grace_period_of_an_nfs_server_are_waited_for_with_a_note(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = fast_dir / "over"
    real = locks.take_lock

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            over.touch()
            return super().write(text)

    def take(path: str) -> bool:
        time.sleep(0.25)  # the note may have been printed before, if the first files took long
        while not over.exists():
            time.sleep(0.01)
        return real(path)

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(locks, "_NOTE_AFTER_S", 0.2)
    monkeypatch.setattr(locks, "take_lock", take)
    (fast_dir / "examined").mkdir()

    report = looked_at(fast_dir / "examined")

    assert "grace period" in screen.getvalue()
    assert found(report)["locks (flock)"].verdict is Verdict.FINE


def test_a_name_with_two_owners_is_unsafe(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrites(path: Path, target: str) -> str:
        new = path.with_name(f"{path.name}-{target}")
        new.symlink_to(target)
        new.replace(path)
        return target

    monkeypatch.setattr(files, "create_name", overwrites)

    report = looked_at(fast_dir)

    assert found(report)["exclusive names"].verdict is Verdict.UNSAFE
    assert report.verdict is Verdict.UNSAFE


@pytest.mark.parametrize(("hidden_s", "verdict"), [(0.3, "slower"), (60.0, "unsafe")])
def test_what_stays_unseen_is_timed_and_judged(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, hidden_s: float, verdict: str
) -> None:
    monkeypatch.setattr(filesystem, "LIMIT_S", 1.0)
    monkeypatch.setattr(filesystem, "_PROMPT_S", 0.1)
    real = filesystem.looks
    began: list[float] = []

    def cached(directory: Path) -> dict[str, Callable[[], bool]]:
        began.append(time.monotonic())
        late = {"heartbeat": lambda: time.monotonic() > began[0] + hidden_s}
        return {**real(directory), **late}

    monkeypatch.setattr(filesystem, "looks", cached)

    report = looked_at(fast_dir)

    assert str(found(report)["delay (heartbeat)"].verdict) == verdict
    assert report.delays_s["new file"] is not None
    assert (report.delays_s["heartbeat"] is None) == (verdict == "unsafe")


def test_a_failed_sync_is_unsafe_and_the_rest_is_still_looked_at(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    def sync(fd: int) -> None:
        if os.getpid() == LEAD:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", sync)

    report = looked_at(fast_dir)

    assert found(report)["fsync"].found == "failed: Input/output error"
    assert report.verdict is Verdict.UNSAFE
    assert found(report)["locks (flock)"].verdict is Verdict.FINE


@pytest.mark.parametrize(
    ("free", "inodes", "unsafe"),
    [(10**12, 10**6, []), (10**6, 10**6, ["space"]), (10**12, 5, ["inodes"]), (10**12, 0, [])],
)
def test_little_room_is_unsafe_and_uncounted_inodes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, inodes: int, unsafe: list[str]
) -> None:
    class Space:
        f_blocks, f_bavail, f_frsize, f_files, f_favail = 10**12, free, 1, inodes, inodes

    monkeypatch.setattr(os, "statvfs", lambda _: Space)

    findings = filesystem.check_space(tmp_path)

    assert [one.check for one in findings if one.verdict is Verdict.UNSAFE] == unsafe


def test_an_examination_of_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_in_place", full)

    report = looked_at(tmp_path)

    assert "No space left" in found(report)["writing"].found
    assert list(tmp_path.iterdir()) == []


def below(root: Path) -> dict[str, Any]:
    """The root's own times change with every name that comes and goes."""
    return {name: value for name, value in tree(root).items() if name != "."}


def test_what_two_sides_prove_is_kept_in_the_run_and_nothing_else(
    fast_dir: Path, request: pytest.FixtureRequest
) -> None:
    toy = ToyRun(fast_dir / "run")
    before = below(toy.root)

    unpaired = looked_at(toy.root)

    assert below(toy.root) == before
    assert "by the lease" in found(unpaired)["deaths"].found

    request.getfixturevalue("apart")
    report = looked_at(toy.root, other=toy.root)

    assert (report.apart, report.locks_proven) == (True, True)
    assert found(report)["locks (flock)"].verdict is Verdict.FINE
    assert "between the two sides" in found(report)["locks (flock)"].found
    kept = json.loads(toy.paths.doctor.read_text())
    assert (kept["format"], kept["locks_proven"], kept["verdict"]) == (1, True, "fine")
    assert {side["boot"] for side in kept["sides"]} == {"lead", "other"}
    assert set(kept["delays_s"]) == set(filesystem.looks(Path()))
    assert "free lock" in found(report)["deaths"].found
    after = below(toy.root)
    assert after.pop("doctor.json")
    assert after == before
