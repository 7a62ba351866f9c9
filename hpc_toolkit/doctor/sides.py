"""The two sides of an examination, the channel between them, and the lead's view of both.

A channel needs no port and works wherever a queue does: each side rewrites its own file in place
and reopens the other's. Both sides create both files first, because a name that is looked up too
early may be cached as missing for a minute (nfs(5)).
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import decode_line, encode_line
from hpc_toolkit.rundir.mounts import Mount, mount_of
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks

if TYPE_CHECKING:
    from pathlib import Path

LEAD, OTHER = "lead", "other"
ANSWER_S = 120.0
BYE = "bye"
_LENGTH = 4096
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1
_PREFIX = ".hpctk-doctor-"
_ABANDONED_S = 3600.0
_TRIES = 5


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
    mine = area / f"owner-{side}"
    try:
        pid = os.getpid()
        owner = [host_name(), boot_id(), pid, process_ticks(pid)]
        files.write_in_place(mine, json.dumps(owner).encode())
    except OSError:
        # A full disk may have room for the directory but not for the file.
        with suppress(OSError):
            mine.unlink(missing_ok=True)
            area.rmdir()
        raise
    return area


def remove_area(area: Path) -> bool:
    for _ in range(_TRIES):
        shutil.rmtree(area, ignore_errors=True)
        if not area.exists():
            return True
        # NFS renames a removed file that a process has open (.nfs...).
        time.sleep(0.1)
    return False


def sweep(root: Path, own: Path) -> list[str]:
    """Remove the areas of killed examinations and return their names.

    An area of this host is abandoned when its process is gone. Processes of other hosts cannot be
    checked; their areas are kept for an hour, by the filesystem's timestamps.
    """
    swept = []
    for name in files.list_names(root):
        area = root / name
        if name.startswith(_PREFIX) and area != own and _is_abandoned(area, own):
            remove_area(area)
            swept.append(name)
    return swept


def _is_abandoned(area: Path, own: Path) -> bool:
    with suppress(OSError):
        if own.stat().st_mtime - area.stat().st_mtime > _ABANDONED_S:
            return True
    for path in area.glob("owner-*"):
        with suppress(OSError, ValueError, TypeError):
            host, boot, pid, ticks = json.loads(files.read_fresh(path))
            if (host, boot) == (host_name(), boot_id()) and process_ticks(pid) != ticks:
                return True
    return False


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Side:
        told = record["mount"]
        mount = Mount(told["point"], told["kind"], told["source"], tuple(told["options"]))
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

    def close(self) -> None:
        self.ask(BYE)
