"""Whole lines of ranks on the terminal.

Torch shows what it finds at the end of a rank's file, with the prefix in front, also where the
rank has written half a line: Python without a buffer writes each word of a ``print`` by itself.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_RANK = re.compile(r"\[rank \d+\] ")


class WholeLines(io.TextIOBase):
    """Passes on text; what a rank wrote only when its line has ended, and then at once."""

    def __init__(self, under: TextIO) -> None:
        self._under = under
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Take ``text``, which torch's threads hand over a line, or a part of one, at a time."""
        with self._lock:
            found = _OF_RANK.match(text)
            if found is None:
                self._under.write(text)
            else:
                prefix = found[0]
                line = self._begun.pop(prefix, "") + text[found.end() :]
                if line.endswith("\n"):
                    self._under.write(prefix + line)
                    self._under.flush()
                else:
                    self._begun[prefix] = line
        return len(text)

    def fileno(self) -> int:
        """That of what is under it: a forked rank sends it elsewhere (--start-method fork)."""
        return self._under.fileno()

    def flush(self) -> None:
        """Pass on what has ended."""
        self._under.flush()

    def end(self) -> None:
        """Pass on the rest: what ranks wrote that ended in the middle of a line."""
        with self._lock:
            for prefix, line in self._begun.items():
                self._under.write(f"{prefix}{line}\n")
            self._begun.clear()
            self._under.flush()


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Have what torch writes to stdout and stderr appear in whole lines."""
    out, err = WholeLines(sys.stdout), WholeLines(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()
