"""Text on its way to a terminal, which obeys what it cannot show."""

from __future__ import annotations


def printable(text: str) -> str:
    """``text`` on one line, with escapes in place of what does not print.

    Names of runs, items and errors come from files that others may have written: an escape
    sequence among them would set the title, clear the screen or hide what follows.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """The same for a text that may have several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))
