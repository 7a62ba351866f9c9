"""What an examination finds, its two sides, and the channel between them.

A channel needs no port and works wherever a queue does: each side rewrites its own file in place
and reopens the other's. Both sides create both files first, because a name that is looked up too
early may be cached as missing for a minute (nfs(5)).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import decode_line, encode_line
from hpc_toolkit.rundir.trust import Mount, mount_of
from hpc_toolkit.system.processes import die_with_parent, readable
from hpc_toolkit.system.ranks import boot_id, host_name


class Verdict(StrEnum):
    """How well the checked thing suits a run."""

    FINE = "fine"
    SLOWER = "slower"
    """Nothing is lost, but work takes longer or is repeated."""
    UNSAFE = "unsafe"
    """A run cannot work here, or can lose data that was reported as stored."""
    UNKNOWN = "unknown"
    """The check was not made, or is not possible."""
    SKIPPED = "skipped"
    """The checked thing does not exist here, and a run can do without it."""


_ORDER = [Verdict.SKIPPED, Verdict.FINE, Verdict.UNKNOWN, Verdict.SLOWER, Verdict.UNSAFE]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Verdict
    found: str
    """The observation, with its numbers."""
    means: str = ""
    """What the observation means for a run."""
    fix: str = ""
    """What to do; "" if nothing is to be done."""


def fine(check: str, found: str, means: str = "") -> Finding:
    return Finding(check, Verdict.FINE, found, means)


def judged(check: str, found: str, verdict: Verdict, means: str, fix: str, *, bad: bool) -> Finding:
    """Return a finding with this verdict, meaning and fix if ``bad``, else a fine one."""
    return Finding(check, verdict, found, means, fix) if bad else fine(check, found)


def worst(findings: Iterable[Finding]) -> Verdict:
    return max((Verdict.FINE, *(one.verdict for one in findings)), key=_ORDER.index)


@dataclass(slots=True)
class Report:
    """The result of examining one directory."""

    directory: str
    """The directory as it was given."""
    findings: list[Finding]
    sides: tuple[Side, ...] = ()
    """The sides, the lead first; empty if the directory is not writable."""
    apart: bool = False
    """Whether the sides stand for two hosts."""
    locks_proven: bool = False
    """Whether flock excluded another host, and became free at its holder's death."""
    delays_s: dict[str, float | None] = field(default_factory=dict)
    """Seconds until one side saw each change of the other side; None if it took too long."""

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


_REAPED_WITHIN_S = 2.0
_MOST_WORDS = 160
LEAD, OTHER = "lead", "other"
ANSWER_S = 120.0
BYE = "bye"
_LENGTH = 4096
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1
_PREFIX = ".hpctk-doctor-"
_TRIES = 5


class Child:
    """A call that may never return, in a process that can be abandoned."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._read)
            _live(call, write)
        os.close(write)

    def answer(self, timeout_s: float) -> Any:
        """Return the result of the call, as decoded from JSON.

        Raises TimeoutError, or the OSError that the call raised, or that it died.
        """
        data = b""
        end = time.monotonic() + timeout_s
        while not data.endswith(b"\n"):
            if not readable(self._read, timeout_s=max(0.0, end - time.monotonic())):
                raise TimeoutError
            part = os.read(self._read, 1 << 16)
            if not part:
                raise OSError("the calling process died")
            data += part
        found = json.loads(data)
        if "errno" in found:
            raise OSError(found["errno"], found["error"])
        return found["answer"]

    def end(self) -> None:
        """Kill the child; one that is stuck in the kernel is left behind."""
        with suppress(OSError):
            os.close(self._read)
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        end = time.monotonic() + _REAPED_WITHIN_S
        with suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.001)


def ask_child(call: Callable[[], Any], timeout_s: float) -> Any:
    """Make a call in a child, kill the child, and return the call's result."""
    child = Child(call)
    try:
        return child.answer(timeout_s)
    finally:
        child.end()


def _live(call: Callable[[], Any], write: int) -> NoReturn:
    try:
        die_with_parent()
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, signal.SIG_DFL)
        try:
            told: dict[str, Any] = {"answer": call()}
        except OSError as error:
            told = {"errno": error.errno or 0, "error": error.strerror or str(error)}
        except Exception as error:  # noqa: BLE001 - a library of others may raise anything
            told = {"errno": 0, "error": f"{type(error).__name__}: {error}"[:_MOST_WORDS]}
        os.write(write, json.dumps(told).encode() + b"\n")
        while True:
            signal.pause()
    finally:
        # After an exception the child must not continue as a second copy of the program.
        os._exit(1)


class SilentSideError(RunError):
    """The other side does not answer."""


class Channel:
    """One end of the channel; messages are numbered, and only the last one is kept."""

    def __init__(self, area: Path, side: str, other: str) -> None:
        self._own = area / f"said-{side}"
        self._other = area / f"said-{other}"
        self._nonce = os.urandom(8).hex()
        self._peer = ""

    def connect(self, timeout_s: float) -> None:
        """Wait until both current processes have read each other's files."""
        self.send(0, {})
        os.close(files.open_or_create(self._other, os.O_RDONLY))
        for record in self._polls(timeout_s):
            if record is None:
                continue
            if record["nonce"] != self._peer:
                # A side that was killed and restarted has another nonce.
                self._peer = record["nonce"]
                self.send(0, {})
            if record["echo"] == self._nonce:
                return

    def send(self, number: int, body: dict[str, Any]) -> None:
        record = {"nonce": self._nonce, "echo": self._peer, "number": number, "body": body}
        room = _LENGTH - len(encode_line({**record, "pad": ""}))
        files.write_in_place(self._own, encode_line({**record, "pad": " " * room}))

    def receive(self, number: int, timeout_s: float) -> dict[str, Any]:
        """Wait for the other side's message of this number."""
        for record in self._polls(timeout_s):
            if record is not None and record["nonce"] == self._peer and record["number"] == number:
                body: dict[str, Any] = record["body"]
                return body
        raise AssertionError  # _polls() ends only with an error

    def _polls(self, timeout_s: float) -> Any:
        end = time.monotonic() + timeout_s
        pause_s = _FIRST_POLL_S
        while True:
            data = files.read_fresh(self._other)
            yield decode_line(data.partition(b"\n")[0])
            if time.monotonic() > end:
                message = f"the other side did not answer within {timeout_s:g} s"
                hint = "start both sides at the same time, on the same directory"
                raise SilentSideError(message, hint=hint)
            if not self._own.exists():
                # A side that ends removes the area, so the other one need not wait for its timeout.
                raise SilentSideError("the other side stopped", hint="see its message")
            time.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, pause_s * 1.2)


def make_area(root: Path, token: str, side: str) -> Path:
    """Create the area of an examination, or use the one that the other side created.

    Raises OSError if this side cannot write to ``root``, its path to the examined directory.
    """
    area = root / f"{_PREFIX}{token}"
    with suppress(FileExistsError):
        area.mkdir()
    first = area / f"room-{side}"
    try:
        files.write_in_place(first, b".")
    except OSError:
        # A full disk may have room for the directory but not for the file.
        with suppress(OSError):
            first.unlink(missing_ok=True)
            area.rmdir()
        raise
    return area


def remove_area(area: Path) -> None:
    for _ in range(_TRIES):
        shutil.rmtree(area, ignore_errors=True)
        if not area.exists():
            return
        # NFS renames a removed file that a process has open (.nfs...).
        time.sleep(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One process that uses the directory by one path."""

    host: str
    boot: str
    device: int
    """The kernel's number of the mounted filesystem; comparable only within one boot."""
    path: str
    """The directory by this side's path."""
    mount: Mount

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Side:
        told = record["mount"]
        mount = Mount(**{**told, "options": tuple(told["options"])})
        return cls(**{**record, "mount": mount})


def side_of(directory: Path) -> Side:
    return Side(
        host=host_name(),
        boot=boot_id(),
        device=os.stat(directory).st_dev,
        path=str(directory),
        mount=mount_of(directory),
    )


def are_apart(one: Side, other: Side) -> bool:
    """Whether results between these sides are valid between hosts.

    Within one kernel only two mounts with separate caches and locks can stand for two hosts. A bind
    mount, or a second NFS mount that shares the cache of the first, has the same device.
    """
    return one.boot != other.boot or one.device != other.device


class Pair:
    """The lead's view of both sides, and its channel to the other one."""

    def __init__(self, area: Path, *, arrival_s: float) -> None:
        self.area = area
        """The area of the examination, by the lead's path."""
        self._channel = Channel(area, LEAD, OTHER)
        self._channel.connect(arrival_s)
        self._number = 0
        self._asked = False
        self.here = side_of(area.parent)
        self.there = Side.from_json(self.ask("where"))
        self.apart = are_apart(self.here, self.there)
        """Whether results between the sides are valid between hosts."""

    def start(self, act: str, **words: Any) -> None:
        if self._asked:
            # A failed check has left its answer unread; the other side takes one request at a time.
            with suppress(OSError):
                self.finish()
        self._number += 1
        self._asked = True
        self._channel.send(self._number, {"act": act, **words})

    def finish(self) -> Any:
        """Wait for the answer to the last request; raises the other side's OSError."""
        told = self._channel.receive(self._number, ANSWER_S)
        self._asked = False
        if "errno" in told:
            raise OSError(told["errno"], f"{told['error']}, on the other side", told["path"])
        return told["answer"]

    def ask(self, act: str, **words: Any) -> Any:
        self.start(act, **words)
        return self.finish()
