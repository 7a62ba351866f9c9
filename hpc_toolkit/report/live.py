"""Views of a run that change: the lines of the full-screen view, and what a notebook shows.

Every value that comes from a run is escaped, because an error message may contain anything.
"""

from __future__ import annotations

import html
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.panel import BAD, DIM, WARN, Row, panel, rate_text, short_panel
from hpc_toolkit.report.terminal import Look, draw, draw_line, text_indent
from hpc_toolkit.results.workers import ALIVE, DIED, HostLine, WorkerLine
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.terminal import columns, cut, pad, printable, split_at

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Status


_NARROW = 49
"""Texts of fewer columns are short."""
_OLD_S = 5.0
_KEYS = ("w workers  j, k scroll  q quit", "w  j k  q quit")


@dataclass(frozen=True, slots=True)
class Live:
    """What is shown of a run."""

    now: Status
    jobs: Sequence[JobRecord] = ()
    hosts: Sequence[HostLine] = ()
    age_s: float = 0.0
    """Seconds since the worker was read that was not read for the longest time."""


@dataclass(slots=True)
class Choices:
    """What the user chose to see."""

    expanded: bool = False
    """Whether every host is shown with its workers."""
    verbose: bool = False
    """Whether these workers are shown with their CPUs, GPUs and memory."""
    offset: int = 0
    """Lines scrolled past."""


def screen_lines(live: Live, chosen: Choices, look: Look, rows: int) -> list[str]:
    """The lines of a screen of ``rows`` rows; corrects an offset beyond the end."""
    room = max(1, rows - 1)
    head, *body = _body(live, look, chosen, None if chosen.expanded or chosen.offset else room)
    space = max(1, room - 1)
    chosen.offset = max(0, min(chosen.offset, len(body) - space))
    shown = body[chosen.offset : chosen.offset + space]
    if hidden := len(body) - chosen.offset - len(shown):
        shown = [*shown[:-1], draw_line(f"  ... {counted(hidden + 1, 'more line')} (j)", DIM, look)]
    shown = [head, *shown][:room]
    keys = next((one for one in _KEYS if len(one) <= look.columns), "q quit")
    return [*shown, *[""] * (room - len(shown)), draw_line(keys, DIM, look)][:rows]


def _body(live: Live, look: Look, chosen: Choices, room: int | None) -> list[str]:
    """All lines; with a ``room``, fewer hosts so that all else fits."""
    top = short_panel(live.now, live.jobs, hosts=len(live.hosts), columns=look.columns)
    text = replace(look, columns=look.columns - text_indent([*top, Row("hosts", "")], look))
    top = [replace(row, text=_cut(row.text, text)) if row.tone == DIM else row for row in top]
    if live.age_s > _OLD_S:
        old = format_duration(live.age_s)
        top.append(Row("", f"read in turn, so some counts are {old} old", DIM))
    places = live.now.places if chosen.verbose else {}
    hosts = _host_rows(live.hosts, text, places, expanded=chosen.expanded)
    lines = draw([*top, *hosts], look)
    if room is None or len(lines) <= room:
        return lines
    # Rows of hosts take one line each, because their texts are cut.
    most = max(0, room - (len(lines) - len(hosts)))
    if len(hosts) > most:
        hosts = hosts[: max(0, most - 1)]
        hidden = len(live.hosts) - sum(row.text.count("% busy") for row in hosts)
        hosts += [Row("", f"and {counted(hidden, 'more host')} (w shows all)", DIM)] if most else []
    return draw([*top, *hosts], look)


def _host_rows(
    hosts: Sequence[HostLine], look: Look, places: Mapping[str, dict[str, Any]], *, expanded: bool
) -> list[Row]:
    width = max((columns(one.host) for one in hosts), default=0)
    rows: list[Row] = []
    fine: list[str] = []
    for one in hosts:
        tone = BAD if one.died else WARN if one.alive and not one.busy else ""
        text = _cut(_host_text(one, width, is_narrow=look.columns < _NARROW), look)
        if not (tone or expanded):
            fine.append(text)
            continue
        rows.append(Row("", text, tone))
        if expanded:
            rows += [_worker_row(worker, look, places.get(worker.name)) for worker in one.workers]
    wide = max(map(columns, fine), default=0) + 4
    beside = max(1, (look.columns + 4) // wide)
    for at in range(0, len(fine), beside):
        texts = [pad(one, wide) for one in fine[at : at + beside]]
        rows.append(Row("", "".join(texts).rstrip()))
    return [replace(row, label="" if number else "hosts") for number, row in enumerate(rows)]


def _host_text(one: HostLine, width: int, *, is_narrow: bool) -> str:
    share = f"{100 * one.busy // one.alive if one.alive else 0:3}% busy"
    rate = rate_text(one.rate_per_s) if one.rate_per_s else "-"
    name = pad(one.host, width)
    if is_narrow:
        deaths = f" {one.deaths} died" if one.deaths else ""
        return f"{name} {one.alive:3} {share}{deaths}"
    deaths = f"  {one.deaths} died" if one.deaths else ""
    workers = "worker " if one.alive == 1 else "workers"
    return f"{name}  {one.alive:3} {workers}  {share}  {rate:<14}{deaths}".rstrip()


def _worker_row(one: WorkerLine, look: Look, place: dict[str, Any] | None) -> Row:
    state = one.state if one.state != ALIVE else "busy" if one.is_busy else "idle"
    parts = [f"{one.done:,} done"]
    parts += [f"{one.failed:,} failed"] if one.failed else []
    parts += [f"{counted(one.deaths, 'executor')} died"] if one.deaths else []
    parts += [one.note] if one.note else []
    if place is not None:
        from hpc_toolkit.system.binding import Place

        parts.append(str(Place.from_record(place)))
    tone = BAD if one.state == DIED else DIM
    return Row("", _cut(f"  {one.name}  {state}  {', '.join(parts)}", look), tone)


def _cut(text: str, look: Look) -> str:
    """The text in one line of these columns."""
    return cut(look.plain(text), look.columns)


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
