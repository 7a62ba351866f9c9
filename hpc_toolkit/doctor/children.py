"""Make calls that may never return in a child process that can be abandoned."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_toolkit.system.processes import die_with_parent, readable

if TYPE_CHECKING:
    from collections.abc import Callable

_REAPED_WITHIN_S = 2.0
_MOST_WORDS = 160


class Child:
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
