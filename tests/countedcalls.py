"""Counts what a process asks of a filesystem."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests.replacedcalls import ReplacedCalls

if TYPE_CHECKING:
    from collections.abc import Callable


class CountedCalls(ReplacedCalls):
    """While inside, every opening, listing, link and look of this process by name is noted."""

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
            # Of a symlink the name that is made counts, not what it says.
            shown = args[0] if name in ("symlink", "link") else path
            self.calls.append((name, os.path.basename(str(shown))))
            return real(path, *args, **kwargs)

        return call

    def opened(self) -> list[str]:
        return [name for call, name in self.calls if call == "open"]
