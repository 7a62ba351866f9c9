"""Complete lines of ranks on the terminal.

Torch prints new text in a rank's log file with a prefix, even if the rank has written only half a
line: unbuffered Python writes each word of a ``print`` separately.
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
    """Passes on text; holds back the text of a rank until its line is complete."""

    def __init__(self, under: TextIO) -> None:
        self._under = under
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}

    def write(self, text: str) -> int:
        """Write ``text``, which torch's threads pass as a line or as a part of one."""
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
        """Return the underlying descriptor, which a forked rank redirects (--start-method fork)."""
        return self._under.fileno()

    def flush(self) -> None:
        """Flush the underlying stream; incomplete lines of ranks stay held back."""
        self._under.flush()

    def end(self) -> None:
        """Write the incomplete last lines of ranks."""
        with self._lock:
            for prefix, line in self._begun.items():
                self._under.write(f"{prefix}{line}\n")
            self._begun.clear()
            self._under.flush()


@contextlib.contextmanager
def whole_lines() -> Iterator[None]:
    """Make torch's output on stdout and stderr appear in complete lines."""
    out, err = WholeLines(sys.stdout), WholeLines(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.end()
            err.end()
