"""Make text safe for a terminal, which would execute escape sequences."""

from __future__ import annotations

import sys
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


def show_error(error: HpcToolkitError) -> None:
    """Write an error and its hint to stderr."""
    hint = f"\nhint: {error.hint}" if error.hint else ""
    # A closed stderr is None, which has no write().
    print(printable_lines(f"error: {error.message}{hint}"), file=sys.stderr)  # noqa: T201
