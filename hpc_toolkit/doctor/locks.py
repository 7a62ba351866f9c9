"""Test, in processes that can be killed, whether locks keep the other side out.

An NFS server grants no new locks, and on NFSv4 no new opens, for a grace period after its start.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from hpc_toolkit.doctor.filesystem import LOCAL_LOCKS_MEAN, LOST_HOSTS
from hpc_toolkit.doctor.sides import Child, Finding, Pair, Verdict, ask_child, fine
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.trust import NFS, Mount
from hpc_toolkit.system.quantities import format_duration

LONGEST_S = 110.0
"""The default of Linux, 90 s, plus the pause before a client retries."""
_NOTE_AFTER_S = 10.0
_NOTE = (
    f"note: the NFS server has not answered for {_NOTE_AFTER_S:g} s. If it has just started, it "
    "answers after its grace period, 90 s by default. "
    f"Doctor waits up to {LONGEST_S:g} s for a lock\n"
)
GRANTED, REFUSED, HUNG = "granted", "refused", "hung"
_ANSWER_S = 10.0
_FREED_WITHIN_S = 15.0
_HUNG = f"a lock request did not come back within {_ANSWER_S:g} s"
_HUNG_ON_NFS = f"{_HUNG}, nor one before within {LONGEST_S:g} s"
_RUN_AGAIN = "if the NFS server was restarted just now, run doctor again in 2 minutes; otherwise "


def take_lock(path: str) -> bool:
    """Take a lock by flock(2), as workers do, without waiting; return whether it was free.

    This process then holds it until it ends. Raises OSError: the filesystem has no such locks.
    """
    fd = files.open_or_create(path, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


class Holder:
    def __init__(self, path: Path) -> None:
        self._child = Child(lambda: take_lock(str(path)))
        self.outcome = GRANTED
        """Whether the process holds the lock: granted, refused, hung, or an error."""
        try:
            self.outcome = GRANTED if self._child.answer(_ANSWER_S) else REFUSED
        except TimeoutError:
            self.outcome = HUNG
        except OSError as error:
            self.outcome = error.strerror or str(error)

    def kill(self) -> None:
        self._child.end()


def try_lock(path: Path) -> str:
    """Take a lock and release it; return granted, refused, hung, or an error."""
    holder = Holder(path)
    holder.kill()
    return holder.outcome


@dataclass(frozen=True, slots=True)
class LockTrial:
    """The results of a lock between the two sides."""

    holding: tuple[str, str]
    """Results of the other side, then of this one, for taking the free lock."""
    against: tuple[str, str]
    """Results of this side, then of the other, for taking the held lock; "" if it was not held."""
    freed_s: float | None
    """Seconds until this side got the lock of a killed process; None if it never got it."""

    @property
    def excludes(self) -> bool:
        held = self.holding == (GRANTED, GRANTED) and self.against == (REFUSED, REFUSED)
        return held and self.freed_s is not None


def try_locks(pair: Pair) -> LockTrial:
    path = pair.area / "lock"
    there = str(pair.ask("hold", name=path.name))
    mine = try_lock(path) if there == GRANTED else ""
    pair.ask("let_go")
    freed_s = _time_until_free(path) if mine == REFUSED else None
    holder = Holder(path)
    try:
        theirs = str(pair.ask("try", name=path.name)) if holder.outcome == GRANTED else ""
    finally:
        holder.kill()
    return LockTrial((there, holder.outcome), (mine, theirs), freed_s)


def _time_until_free(path: Path) -> float | None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < _FREED_WITHIN_S:
        if try_lock(path) == GRANTED:
            return round(passed, 3)
        time.sleep(0.01)
    return None


def check_locks(pair: Pair, mount: Mount) -> tuple[list[Finding], bool]:
    """Test locks between the sides; also return whether they exclude the other side."""
    if mount.kind in NFS:
        # The trial has short timeouts, so a first lock waits for the end of a grace period. The
        # trial judges a request that fails or hangs.
        with waiting_for_server(mount), suppress(TimeoutError, OSError):
            ask_child(lambda: take_lock(str(pair.area / "lock-first")), LONGEST_S)
    trial = try_locks(pair)
    return [_judge(trial, pair.apart, pair.here.mount)], trial.excludes


def _judge(trial: LockTrial, apart: bool, mount: Mount) -> Finding:
    check = "locks (flock)"
    if trial.excludes:
        where = "between the two sides" if apart else "within this host"
        found = f"held on one side, refused on the other, {where}; free "
        found += f"{format_duration(trial.freed_s or 0.0)} after a kill -9 of the process alone"
        means = f"a worker's death can be seen by its lock; {LOST_HOSTS}"
        if not apart:
            means = "a check between two hosts is needed to know whether other hosts see them"
        return fine(check, found, means)
    if HUNG in (*trial.holding, *trial.against):
        found, again = (_HUNG_ON_NFS, _RUN_AGAIN) if mount.kind in NFS else (_HUNG, "")
        means = "a worker locks its own file when it starts, and may wait forever"
        fix = f"{again}ask the site for working locks, or choose another directory"
        return Finding(check, Verdict.UNSAFE, found, means, fix)
    fix = "nothing, for a run; with a shorter --lease deaths are seen sooner"
    return Finding(check, Verdict.SLOWER, _what_failed(trial), LOCAL_LOCKS_MEAN, fix)


def _what_failed(trial: LockTrial) -> str:
    errors = [one for one in (*trial.holding, *trial.against) if one not in (GRANTED, REFUSED, "")]
    if errors:
        return f"not possible here: {errors[0]}"
    if GRANTED in trial.against:
        return "granted to both sides at once"
    if trial.against[0] == REFUSED and trial.freed_s is None:
        return f"still held {_FREED_WITHIN_S:g} s after its holder was killed"
    return "refused though nobody held it"


@contextmanager
def waiting_for_server(mount: Mount) -> Iterator[None]:
    """Print a note on stderr if the block waits long for an NFS server."""
    note = Timer(_NOTE_AFTER_S, sys.stderr.write, [_NOTE])
    if mount.kind in NFS:
        note.start()
    try:
        yield
    finally:
        note.cancel()
