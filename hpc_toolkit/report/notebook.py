"""Show a run's status in a notebook, in place while it changes, and on a terminal line by line.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import math
import os
import re
import sys
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.panel import one_line, panel
from hpc_toolkit.report.terminal import Look, draw
from hpc_toolkit.system.terminal import printable, split_at

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
_QUIET_S, _REFRESH_S = 1.0, 0.5
"""Seconds before the line of :class:`Waiting` is shown, and between two changes of it."""
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
        if _shell() is None:
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
