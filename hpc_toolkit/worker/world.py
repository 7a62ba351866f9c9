"""What an item finds and may change: the current directory and the umask of its process."""

from __future__ import annotations

import os
import posix
from contextlib import suppress
from functools import wraps
from typing import Any

LONG_S = 0.001
"""Seconds of an item after which the system calls of a check take no noticeable time.

Before that, only changes by Python's own functions are undone.
"""


class World:
    """The current directory and the umask with which each item of this process starts."""

    def __init__(self) -> None:
        self._path: str | None = None
        """The directory; None if it was removed."""
        self._directory = -1
        self._umask = 0o077
        self.changed = True
        """Whether an item called a function of Python that changes it."""

    def watch(self) -> None:
        """Notice calls of Python's functions that change it; a check costs a fifth of a no-op."""
        # umask(2) reads the mask only by changing it; a process that was just forked has no other
        # thread that could create a file meanwhile.
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        for name in ("chdir", "fchdir", "umask"):
            found = getattr(posix, name)
            noted = self._noted(found)
            for module in (os, posix):  # pickle compares what both have
                setattr(module, name, noted)
            os.supports_fd |= {noted} if found in os.supports_fd else set()

    def _noted(self, function: Any) -> Any:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.changed = True
            return function(*args, **kwargs)

        return call

    def keep(self) -> None:
        """Start the next items with what is set now."""
        if (now := os.umask(self._umask)) != self._umask:
            self._umask = now
            os.umask(now)
        path = None
        with suppress(OSError):
            path = os.getcwd()
        if path is None or path != self._path:
            before, self._directory = self._directory, os.open(".", os.O_PATH)
            self._path = path
            with suppress(OSError):
                os.close(before)
        self.changed = False

    def restore(self) -> None:
        """Undo what an item changed."""
        os.umask(self._umask)
        path = None
        with suppress(OSError):
            path = os.getcwd()
        # Not at once: fchdir(2) asks the server of a network filesystem.
        if path is None or path != self._path:
            try:
                os.fchdir(self._directory)  # also if it was moved or removed
            except OSError:  # the item closed all descriptors
                os.chdir(self._path or ".")
        self.changed = False


WORLD = World()
