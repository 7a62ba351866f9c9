"""An NFSv3 client whose server's clock does not advance."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_toolkit.rundir import files


class StaleClient:
    """Reads a file again only if its size changed, as an ``open`` does within one clock tick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies: dict[Path, bytes] = {}
        monkeypatch.setattr(files, "read_fresh", self.read)

    def read(self, path: Path) -> bytes:
        copy = self._copies.get(path, b"")
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return b""
        if size != len(copy):
            # Read only this many bytes, because the file may grow meanwhile.
            with path.open("rb", buffering=0) as file:
                copy = self._copies[path] = file.read(size)
        return copy
