"""The full-screen view of ``hpctk status --watch``; imports no command line framework.

The terminal is restored at the end, whatever ends it. The sequences are those of ECMA-48 and xterm,
which every terminal since then understands; no terminal database is read.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, TextIO

from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.report.live import Choices, Live, screen_lines
from hpc_toolkit.report.panel import DIM, Row
from hpc_toolkit.report.terminal import LEAST_COLUMNS, Look, draw, draw_line
from hpc_toolkit.results.workers import Sampler, living_workers, read_hosts
from hpc_toolkit.rundir.layout import refuse_removed
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.processes import readable

if TYPE_CHECKING:
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.run import Run
    from hpc_toolkit.training.progress import Progress

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
_KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[5~": "pageup",
    "\x1b[6~": "pagedown",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
}
END = "end of input"
"""The key that stands for a terminal that was closed."""


def is_capable(stdin: TextIO | None, stdout: TextIO) -> bool:
    """Whether both streams are a terminal that can show a whole screen."""
    capable = os.environ.get("TERM", "dumb") != "dumb"
    return capable and stdin is not None and stdin.isatty() and stdout.isatty()


class Screen:
    """A block in which the terminal of stdin and stdout shows lines of one program.

    SIGTERM and SIGHUP end the block with SystemExit; ^C raises KeyboardInterrupt, as anywhere.
    """

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._shown: list[str] = []
        self._size: os.terminal_size | None = None
        self._pressed: list[str] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        sys.stdout.flush()
        self._modes = termios.tcgetattr(self._in)
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._old_wake = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        handlers = {
            signal.SIGTERM: _end,
            signal.SIGHUP: _end,
            signal.SIGWINCH: lambda *_: None,
            signal.SIGTSTP: self._suspend,
        }
        try:
            for number, handler in handlers.items():
                self._before[number] = signal.signal(number, handler)
            self._begin()
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def size(self) -> os.terminal_size:
        size = os.get_terminal_size(self._out)
        # A serial console reports nothing.
        return os.terminal_size((size.columns or 80, size.lines or 24))

    def show(self, lines: list[str]) -> None:
        """Show these lines from the top; only lines that changed are written."""
        size = self.size()
        if size != self._size:
            self._size, self._shown = size, []
            self._write("\x1b[2J")
        lines = lines[: size.lines]
        parts = [
            f"\x1b[{row};1H\x1b[K{line}\x1b[0m"
            for row, line in enumerate(lines, 1)
            if row > len(self._shown) or self._shown[row - 1] != line
        ]
        if len(lines) < len(self._shown):
            parts.append(f"\x1b[{len(lines) + 1};1H\x1b[J")
        self._write("".join(parts))
        self._shown = list(lines)

    def key(self, timeout_s: float) -> str:
        """Wait for a key; "" after the timeout or a resize, and END if the terminal is gone."""
        if not self._pressed:
            ready = readable(self._in, self._wake_read, timeout_s=timeout_s)
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            if self._in in ready:
                self._read()
        return self._pressed.pop(0) if self._pressed else ""

    def _read(self) -> None:
        try:
            data = os.read(self._in, 1024)
        except OSError:
            data = b""
        self._pressed += split_keys(data.decode(errors="replace")) if data else [END]

    def _begin(self) -> None:
        tty.setcbreak(self._in, termios.TCSADRAIN)
        self._size, self._shown = None, []
        self._write(_ENTER)

    def _restore(self) -> None:
        # A further signal must not interrupt this.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # The terminal may be gone.
        with suppress(OSError, termios.error):
            self._write(_LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._modes)
        signal.set_wakeup_fd(self._old_wake)
        for caught, handler in self._before.items():
            signal.signal(caught, handler)
        self._before.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _suspend(self, *_: object) -> None:
        """Give the terminal back to the shell for ^Z, and take it again when it continues."""
        self._write(_LEAVE)
        termios.tcsetattr(self._in, termios.TCSADRAIN, self._modes)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        # The process continues here.
        signal.signal(signal.SIGTSTP, self._suspend)
        self._begin()

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def split_keys(text: str) -> list[str]:
    """The keys that a terminal sent together."""
    found = []
    while text:
        known = [code for code in _KEYS if text.startswith(code)]
        code = max(known, key=len, default=text[0])
        if code == "\x1b" and text[1:2] in ("[", "O"):  # a key without a meaning here
            end = next((at for at, c in enumerate(text[2:], 3) if c.isalpha() or c == "~"), 2)
            text = text[end:]
            continue
        found.append(_KEYS.get(code, code))
        text = text[len(code) :]
    return found


REFRESH_S = 2.0
_BUSY = 0.05
"""Largest share of a processor that refreshes may take."""
_SCROLL = {"j": 1, "down": 1, "k": -1, "up": -1}
_PAGES = {"pagedown": 1, " ": 1, "pageup": -1}


class LiveView:
    """Shows a run until it is complete or the user quits.

    It reads the run with few file operations after the first time.
    """

    def __init__(self, run: Run, screen: Screen, chosen: Choices, *, slurm: bool) -> None:
        from hpc_toolkit.submit.jobs import JobStates
        from hpc_toolkit.submit.standstill import beside_of

        self.run, self.screen, self.chosen = run, screen, chosen
        self.records: list[JobRecord] = []
        self.live: Live | None = None
        self._jobs, self._slurm = JobStates(run.paths), slurm
        self._clock = SystemClock()
        self._sampler = Sampler(run.view, self._clock)
        self._beside = beside_of(run, lambda: self.records)
        self._seen: dict[str, Presence | None] = {}

    def _read(self) -> Live:
        """Read everything that is new. Raises RunError: the run was removed, perhaps meanwhile."""
        view = self.run.view
        try:
            seen = self._seen = self._sampler.look()
            now = self.run.status(seen=seen, beside=self._beside)
            alive = living_workers(view, self._clock, seen)
            return Live(now, self.records, read_hosts(view, seen, alive), self._sampler.oldest_s())
        finally:
            refuse_removed(self.run.root)

    def follow(self) -> Status:
        next_s, used_s = 0.0, float("inf")  # the first refresh does not delay the second
        while True:
            if time.monotonic() >= next_s:
                self.live = self._read()
                self._show()
                if self.live.now.complete:
                    break
                next_s = 0.0
                before = self.records
                # Asks Slurm only now and then.
                self.records = self._jobs.read(ask=self._slurm, seen=self._seen.values())
                if self.records == before:
                    used_s, before_s = time.process_time(), used_s
                    next_s = time.monotonic() + max(REFRESH_S, (used_s - before_s) / _BUSY)
            key = self.screen.key(max(0.0, next_s - time.monotonic()))
            if key in ("q", END):
                break
            self._press(key)
            self._show()
        assert self.live is not None
        return self.live.now

    def _show(self) -> None:
        assert self.live is not None
        look, rows = _look(self.screen)
        self.screen.show(screen_lines(self.live, self.chosen, look, rows))

    def _press(self, key: str) -> None:
        chosen = self.chosen
        if key == "w":
            chosen.expanded, chosen.offset = not chosen.expanded, 0
        elif key in ("g", "home", "G", "end"):
            chosen.offset = 0 if key in ("g", "home") else sys.maxsize
        else:
            chosen.offset += _SCROLL.get(key, 0)
            chosen.offset += _PAGES.get(key, 0) * max(1, self.screen.size().lines - 3)


def _look(screen: Screen) -> tuple[Look, int]:
    """What the terminal can show now, and its rows."""
    size = screen.size()
    # The variable COLUMNS, which Look.of reads, would not change with the window.
    look = replace(Look.of(sys.stdout), columns=max(size.columns, LEAST_COLUMNS))
    return look, size.lines


@contextlib.contextmanager
def _quiet_screen() -> Iterator[Screen]:
    """A screen; what is written to stderr meanwhile appears after it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), Screen() as screen:
            yield screen
    finally:
        sys.stderr.write(said.getvalue())


def follow_training(
    read: Callable[[], Progress], rows_of: Callable[[Progress], list[Row]]
) -> Progress:
    """Show a training on the whole terminal until its jobs have ended or the user quits."""
    with _quiet_screen() as screen:
        while True:
            now = read()
            look, rows = _look(screen)
            lines = draw(rows_of(now), look, most=rows - 1)
            lines += [""] * (rows - 1 - len(lines))
            screen.show([*lines, draw_line("q quit", DIM, look)])
            if now.ended or not now.jobs or screen.key(REFRESH_S) in ("q", END):
                return now


def follow_live(run: Run, *, slurm: bool, verbose: bool) -> tuple[Status, list[JobRecord]]:
    """Show a run on the whole terminal; return its last status and its jobs.

    ``verbose``: begin with every worker and what it has of its host.
    """
    from hpc_toolkit.submit.jobs import JobStates

    gc.enable()
    chosen = Choices(expanded=verbose, verbose=verbose)
    with _quiet_screen() as screen:
        view = LiveView(run, screen, chosen, slurm=slurm)
        now = view.follow()
    if not now.complete:
        return now, view.records
    # They are about to end, and what Slurm said before would be the last word.
    return now, JobStates(run.paths).read(ask=slurm)
