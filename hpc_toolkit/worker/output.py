"""The standard output and error of an executor, which are its worker's log."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from hpc_toolkit.rundir.files import write_all


class _LogFile(io.FileIO):
    """Drops output that a full disk refuses, so that the item that printed it does not fail."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def text_stream(fd: int) -> TextIO:
    """The log as text, written line by line, so that a crash loses no printed line."""
    file = io.BufferedWriter(_LogFile(fd, "w", closefd=False))
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", line_buffering=True)


class Log:
    """The log by a descriptor of its own: an item may close or redirect descriptors 1 and 2."""

    def __init__(self, fd: int) -> None:
        self._fd, self._inode = fd, os.fstat(fd).st_ino

    def settle(self) -> int:
        """Flush what was printed, and return the size of the log."""
        try:
            sys.stdout.flush()
            found = os.fstat(1)
            if found.st_ino == self._inode and not sys.stderr.closed:
                return found.st_size
        except BaseException:  # noqa: BLE001 - such as that of an object of the user
            return self.reopen()
        return self.reopen()

    def reopen(self) -> int:
        """Like :meth:`settle`, after opening what an item closed; this takes 5 us longer."""
        for fd, name in ((1, "stdout"), (2, "stderr")):
            try:
                os.get_inheritable(fd)
            except OSError:
                os.dup2(self._fd, fd)
            stream = getattr(sys, name)
            try:
                stream.flush()
            except BaseException as error:  # noqa: BLE001 - closed, or an object of the user
                if stream is None or not isinstance(error, AttributeError):
                    setattr(sys, name, text_stream(fd))
        return os.fstat(self._fd).st_size

    def write(self, text: str) -> None:
        with suppress(OSError):
            write_all(self._fd, text.encode(errors="backslashreplace"))
