"""Temporarily replaces functions of :mod:`os` in a test: to count calls, or to have one fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self


class ReplacedCalls:
    """Inside the block, replaces each function in ``CALLS`` by the result of :meth:`wrap`."""

    CALLS: ClassVar[tuple[str, ...]]

    def __enter__(self) -> Self:
        self._real = {name: getattr(os, name) for name in self.CALLS}
        for name, real in self._real.items():
            setattr(os, name, self.wrap(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function to call instead of ``real``."""
        raise NotImplementedError


class CountedCalls(ReplacedCalls):
    """Records this process's calls that open, list, link or stat a name inside the block."""

    CALLS = (
        "open",
        "listdir",
        "scandir",
        "readlink",
        "symlink",
        "link",
        "stat",
        "lstat",
        "mkdir",
        "unlink",
    )

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """(call, last part of the path), in order."""

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            # For a link, record the name that is created, not its target.
            shown = args[0] if name in ("symlink", "link") else path
            self.calls.append((name, os.path.basename(str(shown))))
            return real(path, *args, **kwargs)

        return call

    def opened(self) -> list[str]:
        return [name for call, name in self.calls if call == "open"]


class Unreadable(ReplacedCalls):
    """Makes opening a file fail inside the block, also for root."""

    CALLS = ("open",)

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path) == str(self._path):
                raise OSError(self._number, os.strerror(self._number), str(path))
            return real(path, *args, **kwargs)

        return call
