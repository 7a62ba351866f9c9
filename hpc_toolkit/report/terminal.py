"""Draw rows on a terminal of any width, with or without colours and Unicode, or in a notebook.

A notebook shows HTML, in which every value of a run is escaped: an error message may contain
anything.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

from hpc_toolkit.report.panel import BAD, DIM, GOOD, WARN, Row, panel
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.record import Record
from hpc_toolkit.system.terminal import columns, cut, pad, printable, split_at, wrap

if TYPE_CHECKING:
    from concurrent import futures

    from hpc_toolkit.results.status import Status

_CODES = {GOOD: "32", BAD: "31", WARN: "33", DIM: "2"}
_BOLD = "1"
_BAR_WIDTHS = (10, 40)
LEAST_COLUMNS = 20
_PIPE_COLUMNS = 10_000
_MOST_LABEL = 12
_GAPS = 4
"""Columns around a label."""


class Look(Record):
    """What a terminal can show."""

    columns: int = _PIPE_COLUMNS
    colour: bool = False
    unicode: bool = True

    @classmethod
    def of(cls, stream: TextIO) -> Look:
        """Find out about a stream; a file or pipe gets plain lines that are not wrapped.

        No colour if NO_COLOR is set (https://no-color.org), or TERM is dumb.
        """
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        is_screen = stream.isatty()
        plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", None)
        columns = _terminal_columns(stream) if is_screen else _PIPE_COLUMNS
        return cls(
            columns=max(columns, LEAST_COLUMNS),
            colour=is_screen and not plain,
            unicode=encoding == "utf8",
        )

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and code and text else text

    def plain(self, text: str) -> str:
        """Return text from a run so that no character of it can control the terminal."""
        safe = printable(text)
        if self.unicode:
            return safe
        return safe.replace("±", "+-").encode("ascii", "backslashreplace").decode()


def _terminal_columns(stream: TextIO) -> int:
    """Columns of a terminal; COLUMNS sets another number.

    ``shutil`` has a function for this, and imports all compression libraries.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return int(given)
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns
    return 80


def draw(rows: Sequence[Row], look: Look | None = None, *, most: int | None = None) -> list[str]:
    """Return the lines of the rows; ``most``: the most lines, the last of which says what is cut.

    ``look`` is by default that of standard output.
    """
    look = look or Look.of(sys.stdout)
    width = text_indent(rows, look) - _GAPS
    lines = [line for row in rows for line in _draw_row(row, width, look)]
    if most is not None and len(lines) > most:
        hidden = len(lines) - most + 1
        lines = [
            *lines[: most - 1],
            look.paint(f"  ... {counted(hidden, 'more line')}", _CODES[DIM]),
        ]
    return lines


def draw_line(text: str, tone: str, look: Look) -> str:
    """One line of text, cut to the width."""
    return look.paint(cut(look.plain(text), look.columns), _CODES.get(tone, ""))


def text_indent(rows: Sequence[Row], look: Look) -> int:
    """The number of columns before the texts of these rows."""
    longest = max((len(row.label) for row in rows), default=0)
    return min(longest, _MOST_LABEL, look.columns // 4) + _GAPS


def _draw_row(row: Row, width: int, look: Look) -> list[str]:
    """Return the row wrapped to the width."""
    text = look.plain(row.text)
    if row.is_title:
        return [look.paint(line, _CODES.get(row.tone, _BOLD)) for line in wrap(text, look.columns)]
    indent = " " * (width + _GAPS)
    label = f"  {pad(look.plain(row.label), width)}  "
    room, needed = look.columns - len(indent), columns(text)
    picture, taken = "", 0
    if row.bar:
        widest = _BAR_WIDTHS[1] if look.columns == _PIPE_COLUMNS else look.columns // 2
        taken = max(_BAR_WIDTHS[0], min(widest, room - needed - 2))
        if taken + 2 + min(needed, 12) <= room:
            picture = _bar(row.bar, taken, look)
    elif row.curve:
        taken = len(row.curve)
        if taken + 2 + min(needed, 12) <= room:
            picture = _spark(row.curve, look)
    first = f"{picture}  " if picture else ""
    before = columns(label) + (taken + 2 if picture else 0)
    wrapped = wrap(text, look.columns, before=before, indent=indent)
    code = _CODES.get(row.tone, "")
    lines = [
        look.paint(label, _CODES[DIM] if not code or code == _CODES[DIM] else code)
        + first
        + look.paint(wrapped[0], code)
    ]
    return lines + [look.paint(line, code) for line in wrapped[1:]]


def _bar(shares: Sequence[float], width: int, look: Look) -> str:
    """Return a bar of done, failed and running items; a share above zero is never hidden."""
    cells = [max(round(share * width), share > 0) for share in shares]
    # What is left is not hidden either.
    most = width - (sum(shares) < 1)
    while sum(cells) > most:
        cells[cells.index(max(cells))] -= 1
    marks = "█▓▒─" if look.unicode else "#x=."
    parts = zip(marks, (*cells, width - sum(cells)), ("32", "31", "36", "2"), strict=True)
    return "".join(look.paint(mark * count, code) for mark, count, code in parts)


def _spark(values: Sequence[float], look: Look) -> str:
    marks = "▁▂▃▄▅▆▇█" if look.unicode else "_.:-=+*#"
    top = max(values)
    levels = [round(value / top * (len(marks) - 1)) if top else 0 for value in values]
    return look.paint("".join(marks[level] for level in levels), "36")


_STYLES = {
    "1": "font-weight:bold",
    "2": "color:#757575",
    "31": "color:#c62828",
    "32": "color:#2e7d32",
    "33": "color:#b26a00",
    "36": "color:#0277bd",
}
"""Of a terminal's codes; the colours are readable on a white page and on a black one."""
_QUIET_S, _REFRESH_S = 1.0, 0.5
"""Seconds before the line of :class:`Waiting` is shown, and between two changes of it."""
_PAINTED = re.compile("\x1b\\[(\\d+)m(.*?)\x1b\\[0m")


def status_html(status: Status) -> str:
    """HTML without scripts: the lines of a terminal in their colours."""
    import html  # only notebooks need it

    lines = html.escape("\n".join(draw(panel(status), Look(colour=True))))
    painted = _PAINTED.sub(lambda at: f'<span style="{_STYLES[at[1]]}">{at[2]}</span>', lines)
    return f'<pre style="text-align:left;white-space:pre-wrap">{painted}</pre>'


def _shell() -> Any:
    """The shell of a notebook's kernel, found without importing anything; or None."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if getattr(shell, "kernel", None) is not None else None


class Waiting:
    """A line on a terminal or in a notebook's cell, while a script waits for results of calls."""

    def __init__(self) -> None:
        self.total = self.done = self.failed = 0
        self.more = ""
        """The workers, and the time left."""
        self.watched = 0
        """Threads that wait now; while there are none, nobody needs ``more``."""
        self._show_at = 0.0
        self._handle: Any = None
        self._cell = -1

    def watch(self, future: futures.Future[Any], timeout: float | None) -> float | None:
        """Show the line until a future is done or time is up; return what is left of the time."""
        from concurrent import futures  # a status does without threads

        shell = _shell()
        if future.done() or not (shell or getattr(sys.stderr, "isatty", bool)()):
            return timeout
        ends = math.inf if timeout is None else time.monotonic() + timeout
        self._show_at = self._show_at or time.monotonic() + _QUIET_S
        shown, self.watched = False, self.watched + 1
        try:
            while not future.done() and (now := time.monotonic()) < ends:
                futures.wait([future], timeout=max(0.0, min(self._show_at, ends) - now))
                if not future.done() and time.monotonic() >= self._show_at:
                    self._show_at, shown = time.monotonic() + _REFRESH_S, True
                    self._show(shell)
        finally:
            self.watched -= 1
            if shell is None and shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
            elif self._handle is not None and self.done + self.failed == self.total:
                self._show(shell)
        return None if timeout is None else max(0.0, ends - time.monotonic())

    def _show(self, shell: Any) -> None:
        left = self.done + self.failed < self.total
        text = f"{self.done:,} of {self.total:,} calls done"
        text += f", {self.failed:,} failed" if self.failed else ""
        text = printable(f"{text}; {self.more}" if left and self.more else text)
        if shell is None:
            room = (os.get_terminal_size(sys.stderr.fileno()).columns or 80) - 1
            sys.stderr.write(f"\r{split_at(text, room)[0]}\x1b[K")
            sys.stderr.flush()
            return
        from IPython.display import display

        if self._handle is None or self._cell != shell.execution_count:
            self._cell = shell.execution_count
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
