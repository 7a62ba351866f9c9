"""Counts what a process asks of a filesystem."""

from __future__ import annotations

import os
from typing import Any, Self


class CountedCalls:
    """While inside, every opening, listing, link and look of this process by name is noted."""

    CALLS = (
        "open",
        "listdir",
        "scandir",
        "readlink",
        "symlink",
        "stat",
        "lstat",
        "mkdir",
        "unlink",
    )

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """(call, last part of the path), in order."""

    def __enter__(self) -> Self:
        self._real = {name: getattr(os, name) for name in self.CALLS}
        for name, real in self._real.items():
            setattr(os, name, self._wrap(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrap(self, name: str, real: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            # Of a symlink the name that is made counts, not what it says.
            shown = args[0] if name == "symlink" else path
            self.calls.append((name, os.path.basename(str(shown))))
            return real(path, *args, **kwargs)

        return call

    def opened(self) -> list[str]:
        return [name for call, name in self.calls if call == "open"]
