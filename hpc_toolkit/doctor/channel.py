"""The channel between two sides: each rewrites its own file in place and reopens the other's.

This needs no port and works wherever a queue does. Both sides create both files first, because a
name that is looked up too early may be cached as missing for a minute (nfs(5)).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import decode_line, encode_line

if TYPE_CHECKING:
    from pathlib import Path

_LENGTH = 4096
_FIRST_POLL_S = 0.002
_LAST_POLL_S = 0.1


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
        """Wait until both current processes have read each other's files.

        Raises:
            SilentSideError: the other side did not arrive.
        """
        self._say(0, {})
        os.close(files.open_or_create(self._other, os.O_RDONLY))
        for record in self._polls(timeout_s):
            if record is None:
                continue
            if record["nonce"] != self._peer:
                # A side that was killed and restarted has another nonce.
                self._peer = record["nonce"]
                self._say(0, {})
            if record["echo"] == self._nonce:
                return

    def send(self, number: int, body: dict[str, Any]) -> None:
        """Send message ``number``.

        Raises:
            OSError: this side's file cannot be written.
        """
        self._say(number, body)

    def receive(self, number: int, timeout_s: float) -> dict[str, Any]:
        """Wait for the other side's message of this number.

        Raises:
            SilentSideError: it did not arrive in time.
        """
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
                hint = "it must see the same directory, and be started at the same time"
                raise SilentSideError(message, hint=hint)
            if not self._own.exists():
                # A side that ends removes the area, so the other one need not wait for its timeout.
                message = "the other side gave up"
                raise SilentSideError(message, hint="its own message says why")
            time.sleep(pause_s)
            pause_s = min(_LAST_POLL_S, pause_s * 1.2)

    def _say(self, number: int, body: dict[str, Any]) -> None:
        record = {"nonce": self._nonce, "echo": self._peer, "number": number, "body": body}
        room = _LENGTH - len(encode_line({**record, "pad": ""}))
        files.write_in_place(self._own, encode_line({**record, "pad": " " * room}))
