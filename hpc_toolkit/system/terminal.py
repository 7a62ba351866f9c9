"""Make text safe for a terminal, which would execute escape sequences, and fit it into columns."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_toolkit.errors import HpcToolkitError


def printable(text: str) -> str:
    """Return ``text`` on one line, with unprintable characters escaped.

    Names of runs, items and errors come from files that others may have written. An escape
    sequence in them could set the title, clear the screen or hide the text that follows.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Like :func:`printable` for text with several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))


def columns(text: str) -> int:
    """Columns that text takes: two for a wide character (CJK, emoji), none for a combining one."""
    return len(text) if text.isascii() else sum(map(_columns, text))


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    import unicodedata  # most texts do without it

    if unicodedata.category(character) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def split_at(text: str, room: int) -> tuple[str, str]:
    """The longest start of a text that takes at most ``room`` columns, and the rest."""
    if text.isascii():
        return text[: max(0, room)], text[max(0, room) :]
    used = 0
    for at, character in enumerate(text):
        used += _columns(character)
        if used > room:
            return text[:at], text[at:]
    return text, ""


def cut(text: str, room: int) -> str:
    """Text in at most ``room`` columns; dots stand for the rest."""
    return f"{split_at(text, room - 3)[0]}..." if split_at(text, room)[1] else text


def pad(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows as lines, with each column as wide as its widest cell."""
    rows = list(rows)
    widths = [max(map(columns, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(pad, row, widths)).rstrip() for row in rows]


def wrap(text: str, room: int, *, before: int = 0, indent: str = "") -> list[str]:
    """Break a text into lines of at most ``room`` columns.

    The first line gets ``before`` columns fewer; later lines begin with ``indent``.
    """
    lines, line, left = [], "", room - before
    for word in re.findall(" *[^ ]+", text):
        fits_alone = not split_at(word.lstrip(), room - len(indent))[1]
        if line and fits_alone and split_at(line + word, left)[1]:
            lines.append(line)
            line, left = indent + word.lstrip(), room
        else:
            line += word
        while split_at(line, left)[1]:
            start, rest = split_at(line, left)
            lines.append(start)
            line, left = indent + rest, room
    return [*lines, line]


def note(text: str, kind: str = "note") -> None:
    """Write a line to stderr that people should read: a note, a warning, what would be done."""
    print(printable(f"{kind}: {text}"), file=sys.stderr)  # noqa: T201


def show_error(error: HpcToolkitError) -> None:
    """Write an error and its hint to stderr."""
    hint = f"\nhint: {error.hint}" if error.hint else ""
    # A closed stderr is None, which has no write().
    print(printable_lines(f"error: {error.message}{hint}"), file=sys.stderr)  # noqa: T201
