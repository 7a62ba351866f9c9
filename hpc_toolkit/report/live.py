"""Views of a run that change: the hosts of the full-screen view, and what a notebook shows.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.panel import BAD, WARN, Row, panel, rate_text
from hpc_toolkit.report.terminal import Look, draw
from hpc_toolkit.results.workers import HostLine
from hpc_toolkit.system.terminal import columns, pad, printable, split_at

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Status


def host_rows(hosts: Sequence[HostLine]) -> list[Row]:
    """A row for each host of the full-screen view, where a host without busy workers stands out."""
    width = max((columns(one.host) for one in hosts), default=0)
    rows = []
    for number, one in enumerate(hosts):
        workers = "worker " if one.alive == 1 else "workers"
        share = f"{100 * one.busy // one.alive if one.alive else 0:3}% busy"
        rate = rate_text(one.rate_per_s) if one.rate_per_s else "-"
        deaths = f"  {one.deaths} died" if one.deaths else ""
        text = f"{pad(one.host, width)}  {one.alive:3} {workers}  {share}  {rate:<14}{deaths}"
        tone = BAD if one.died else WARN if one.alive and not one.busy else ""
        rows.append(Row("" if number else "hosts", text.rstrip(), tone))
    return rows


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
