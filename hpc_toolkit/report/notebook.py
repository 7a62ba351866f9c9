"""Show a run's status in a notebook, in place while it changes, and on a terminal line by line.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.panel import BAD, DIM, GOOD, WARN, one_line, panel
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hpc_toolkit.report.panel import Bar, Row
    from hpc_toolkit.results.status import Status

_COLOURS = {GOOD: "#2e7d32", BAD: "#c62828", WARN: "#b26a00", DIM: "#757575"}
"""Readable on a white page and on a black one."""
_BAR = ("#2e7d32", "#c62828", "#0277bd")
"""Done, failed, running."""
_CURVE = (120, 16)
"""Width and height of a curve in pixels."""


def status_html(status: Status) -> str:
    """HTML without scripts: the rows of :func:`hpc_toolkit.report.panel.panel`."""
    return rows_html(panel(status))


def rows_html(rows: Iterable[Row]) -> str:
    return f'<table style="text-align:left">{"".join(map(_row_html, rows))}</table>'


def _row_html(row: Row) -> str:
    colour = _COLOURS.get(row.tone)
    style = f' style="text-align:left;color:{colour}"' if colour else ' style="text-align:left"'
    text = html.escape(printable(row.text))
    if row.is_title:
        return f'<tr><th colspan="2"{style}>{text}</th></tr>'
    picture = _bar_html(row.bar) if row.bar is not None else _curve_html(row.curve)
    label = html.escape(printable(row.label))
    return f'<tr><td style="text-align:left">{label}</td><td{style}>{picture}{text}</td></tr>'


def _bar_html(bar: Bar) -> str:
    widths = (bar.done, bar.failed, bar.running)
    parts = (
        f'<span style="display:inline-block;height:0.8em;width:{width:.2%};background:{colour}">'
        "</span>"
        for width, colour in zip(widths, _BAR, strict=True)
    )
    frame = "display:inline-block;width:16em;border:1px solid #757575;line-height:0;font-size:1em"
    said = f"{bar.done:.0%} done, {bar.failed:.0%} failed"
    return f'<span role="img" aria-label="{said}" style="{frame}">{"".join(parts)}</span> '


def _curve_html(values: Sequence[float]) -> str:
    if not values:
        return ""
    width, height = _CURVE
    top = max(values) or 1.0
    step = width / len(values)
    bars = "".join(
        f'<rect x="{n * step:.1f}" y="{height * (1 - one / top):.1f}" width="{step:.1f}"'
        f' height="{height * one / top:.1f}" fill="{_BAR[2]}"/>'
        for n, one in enumerate(values)
    )
    size = f'width="{width}" height="{height}"'
    return f'<svg {size} role="img" aria-label="items done over time">{bars}</svg> '


class StatusDisplay:
    """Shows a changing status: in place in a notebook, line by line on stdout elsewhere."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = ("", "")

    def show(self, status: Status) -> None:
        """Show the status, unless nothing changed."""
        before, self._shown = self._shown, (one_line(status), status.reason)
        if self._shown == before:
            return
        # The kernel of a notebook, found without importing anything.
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if getattr(shell, "kernel", None) is None:
            new = [text for text, old in zip(self._shown, before, strict=True) if text != old]
            sys.stdout.writelines(f"{printable(text)}\n" for text in new if text)
            sys.stdout.flush()
            return
        from IPython.display import HTML, display

        piece = HTML(status_html(status))
        if self._handle is None:
            self._handle = display(piece, display_id=True)
        else:
            self._handle.update(piece)
