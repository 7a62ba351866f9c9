"""A process on a host with which a test talks in lines."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.sharedfs.rehearsal import PYTHONPATH

if TYPE_CHECKING:
    from tests.sharedfs.filesystems import Filesystem


class Side:
    """A module of the tests on one host; it is ready."""

    def __init__(self, filesystem: Filesystem, host: str, module: str, *words: object) -> None:
        argv = [sys.executable, "-m", f"tests.sharedfs.{module}", *map(str, words)]
        self._process = subprocess.Popen(
            filesystem.hosts.command(host, argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            cwd="/",
            text=True,
        )
        assert self.line() == "ready"

    def tell(self, word: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End it: what it reads has come to its end."""
        self._process.communicate()
