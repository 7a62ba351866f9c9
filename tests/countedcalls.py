"""Counts the filesystem calls of a process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.replacedcalls import ReplacedCalls


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
