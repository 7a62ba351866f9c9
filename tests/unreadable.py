"""A file that cannot be opened, even by root."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self


class Unreadable:
    """Makes opening this file fail inside the block."""

    def __init__(self, path: Path, number: int) -> None:
        self._path = path
        self._number = number

    def __enter__(self) -> Self:
        self._open = os.open
        os.open = self._refuse
        return self

    def __exit__(self, *_: object) -> None:
        os.open = self._open

    def _refuse(self, path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(self._path):
            raise OSError(self._number, os.strerror(self._number), str(path))
        return self._open(path, *args, **kwargs)
