"""Draw rows on a terminal of any width, with or without colours and Unicode."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from hpc_toolkit.report.panel import BAD, DIM, GOOD, WARN, Bar, Row
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.record import Record
from hpc_toolkit.system.terminal import columns, cut, pad, printable, wrap

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
    if row.bar is not None:
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


def _bar(bar: Bar, width: int, look: Look) -> str:
    """Return a bar of done, failed and running items; a share above zero is never hidden."""
    cells = {name: round(share * width) for name, share in _shares(bar)}
    for name, share in _shares(bar):
        if share > 0 and not cells[name]:
            cells[name] = 1
    # What is left is not hidden either.
    most = width - (bar.done + bar.failed + bar.running < 1)
    while sum(cells.values()) > most:
        cells[max(cells, key=lambda name: cells[name])] -= 1
    marks = ("█", "▓", "▒", "─") if look.unicode else ("#", "x", "=", ".")
    rest = width - sum(cells.values())
    parts = zip(marks, (*cells.values(), rest), ("32", "31", "36", "2"), strict=True)
    return "".join(look.paint(mark * count, code) for mark, count, code in parts)


def _shares(bar: Bar) -> tuple[tuple[str, float], ...]:
    return ("done", bar.done), ("failed", bar.failed), ("running", bar.running)


def _spark(values: Sequence[float], look: Look) -> str:
    marks = "▁▂▃▄▅▆▇█" if look.unicode else "_.:-=+*#"
    top = max(values)
    levels = [round(value / top * (len(marks) - 1)) if top else 0 for value in values]
    return look.paint("".join(marks[level] for level in levels), "36")
