"""A filesystem that fails calls at random: some with no effect, some in part, some after all."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
_FDS = ("write", "pwrite", "pread", "fsync", "fdatasync", "ftruncate", "flock")
_PATHS = ("open", "mkdir", "unlink", "readlink", "listdir", "rename", "stat")
_SECOND = ("symlink", "link")
_CHANGES = {"open", "mkdir", "unlink", "symlink", "link", "rename", "fdatasync", "ftruncate"}


class Flaky:
    """Fails a part of the calls of this process below a directory."""

    def __init__(
        self,
        root: Path,
        rate: float = 1.0,
        seed: int = 0,
        *,
        while_exists: Path | None = None,
        names: tuple[str, ...] = (*_FDS, *_PATHS, *_SECOND),
    ) -> None:
        """Only calls of ``names`` fail, and only ``while_exists`` is there, if it is given."""
        self._root = os.path.realpath(root)
        self._switch, self._names, self._stat = while_exists, names, os.stat
        self._rate = rate
        self._random = random.Random(seed)
        self._readlink, self._pid = os.readlink, 0
        self.failed = 0

    def install(self) -> None:
        """For the rest of this process; its executor is not its filesystem's victim."""
        self._pid = os.getpid()
        for name in self._names:
            owner = fcntl if name == "flock" else os
            setattr(owner, name, self._wrap(name, getattr(owner, name)))

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            spared = os.getpid() != self._pid or self._random.random() >= self._rate
            if spared or not self._concerns(name, args):
                return real(*args, **kwargs)
            self.failed += 1
            way = self._random.choice(("before", "after"))
            if name in ("write", "pwrite"):
                data = bytes(args[1])
                size = self._random.randint(0, len(data))
                if size:
                    real(args[0], data[:size], *args[2:])
            elif way == "after" and name in _CHANGES:
                found = real(*args, **kwargs)
                if name == "open":
                    os.close(found)
            number = self._random.choice(ERRORS)
            raise OSError(number, os.strerror(number), None if name in _FDS else str(args[0]))

        return call

    def _concerns(self, name: str, args: tuple[Any, ...]) -> bool:
        if self._switch is not None:
            try:
                self._stat(self._switch)
            except FileNotFoundError:
                return False
        where = args[1] if name in _SECOND else args[0] if args else "."
        try:
            if isinstance(where, int):
                where = self._readlink(f"/proc/self/fd/{where}")
            path = os.path.abspath(os.fspath(where))
        except (OSError, TypeError, ValueError):
            return False
        return path.startswith(f"{self._root}/")
