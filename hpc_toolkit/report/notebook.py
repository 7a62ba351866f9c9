"""Show a run's status in a notebook, in place while it changes, and on a terminal line by line.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import re
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.panel import one_line, panel
from hpc_toolkit.report.terminal import Look, draw
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Status

_STYLES = {
    "1": "font-weight:bold",
    "2": "color:#757575",
    "31": "color:#c62828",
    "32": "color:#2e7d32",
    "33": "color:#b26a00",
    "36": "color:#0277bd",
}
"""Of a terminal's codes; the colours are readable on a white page and on a black one."""
_PAINTED = re.compile("\x1b\\[(\\d+)m(.*?)\x1b\\[0m")


def status_html(status: Status) -> str:
    """HTML without scripts: the lines of a terminal in their colours."""
    lines = html.escape("\n".join(draw(panel(status), Look(colour=True))))
    painted = _PAINTED.sub(lambda at: f'<span style="{_STYLES[at[1]]}">{at[2]}</span>', lines)
    return f'<pre style="text-align:left;white-space:pre-wrap">{painted}</pre>'


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
