"""What of a text fits a terminal."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_INDENT = 11
"""Where the text of a status line begins."""


def fit(lines: Sequence[str], errors: Sequence[str], *, columns: int, rows: int) -> list[str]:
    """The rows that a terminal of this size shows, of printable lines without newlines.

    ``lines`` are wrapped, and each of ``errors``, which come last, is cut to one row. What the
    rows do not hold is left out from the end, and counted in its place.
    """
    from rich.cells import chop_cells

    indent = " " * min(_INDENT, columns // 3)
    wrapped = [
        row
        for line in lines
        for row in textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
    ]
    shown = [part for row in wrapped for part in chop_cells(row, columns)]
    shown += [chop_cells(error, columns)[0] for error in errors]
    # The last row is the cursor's.
    if len(shown) < rows:
        return shown
    kept = max(1, rows - 2)
    return [*shown[:kept], f"  and {len(shown) - kept} more lines"[:columns]]
