"""The full-screen view of ``hpctk status --watch``; imports no command line framework.

The terminal is restored at the end, whatever ends it. The sequences are those of ECMA-48 and xterm,
which every terminal since then understands; no terminal database is read.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn, TextIO

from hpc_toolkit.report.panel import DIM, Row
from hpc_toolkit.report.terminal import LEAST_COLUMNS, Look, draw, draw_line
from hpc_toolkit.system.processes import handling, readable

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"


def is_capable(stdin: TextIO | None, stdout: TextIO) -> bool:
    """Whether both streams are a terminal that can show a whole screen."""
    capable = os.environ.get("TERM", "dumb") != "dumb"
    return capable and stdin is not None and stdin.isatty() and stdout.isatty()


class Screen:
    """The terminal of stdin and stdout, while :func:`full_screen` shows lines on it."""

    def __init__(self) -> None:
        self._in, self._out = sys.stdin.fileno(), sys.stdout.fileno()
        self._modes = termios.tcgetattr(self._in)
        self._wake, self.wake_write = self.pipe = os.pipe()
        for fd in self.pipe:
            os.set_blocking(fd, False)
        self._shown: list[str] = []
        self._size: os.terminal_size | None = None
        self._rows: Sequence[Row] = ()

    def draw(self, rows: Sequence[Row]) -> None:
        """Show rows, as many as there is room for, and the key that quits.

        Only lines that changed are written.
        """
        self._rows = rows
        given = os.get_terminal_size(self._out)
        # A serial console reports nothing.
        size = os.terminal_size((given.columns or 80, given.lines or 24))
        # The variable COLUMNS, which Look.of reads, would not change with the window.
        look = replace(Look.of(sys.stdout), columns=max(size.columns, LEAST_COLUMNS))
        room = max(1, size.lines - 1)
        lines = draw(rows, look, most=room)
        lines += [""] * (room - len(lines)) + [draw_line("q quit", DIM, look)]
        lines = lines[: size.lines]
        if size != self._size:
            self._size, self._shown = size, [""] * len(lines)
            self._write("\x1b[2J")
        shown = enumerate(zip(self._shown, lines, strict=True), 1)
        parts = (f"\x1b[{row};1H\x1b[K{new}\x1b[0m" for row, (old, new) in shown if old != new)
        self._write("".join(parts))
        self._shown = lines

    def wait(self, seconds: float) -> bool:
        """Wait for a while; whether the user quit. A resize draws the rows anew."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            ready = readable(self._in, self._wake, timeout_s=left_s)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self.draw(self._rows)
            if self._in in ready:
                keys = b""
                with suppress(OSError):
                    keys = os.read(self._in, 1024)
                if not keys or b"q" in keys:  # or the terminal is gone
                    return True
        return False

    def begin(self) -> None:
        tty.setcbreak(self._in, termios.TCSADRAIN)
        self._size, self._shown = None, []
        self._write(_ENTER)

    def end(self) -> None:
        # The terminal may be gone.
        with suppress(OSError, termios.error):
            self._write(_LEAVE)
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._in, termios.TCSADRAIN, self._modes)

    def suspend(self, *_: object) -> None:
        """Give the terminal back to the shell for ^Z, and take it again when it continues."""
        self.end()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        # The process continues here.
        signal.signal(signal.SIGTSTP, self.suspend)
        self.begin()

    def _write(self, text: str) -> None:
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._out, data) :]


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def full_screen() -> Iterator[Screen]:
    """A block with a screen; what is written to stderr meanwhile appears after it.

    SIGTERM and SIGHUP end the block with SystemExit; ^C raises KeyboardInterrupt, as anywhere.
    """
    sys.stdout.flush()
    said, screen, ends = io.StringIO(), Screen(), (signal.SIGTERM, signal.SIGHUP)
    woken = signal.set_wakeup_fd(screen.wake_write, warn_on_full_buffer=False)
    try:
        with (
            handling(ends, _end),
            handling((signal.SIGWINCH,), lambda *_: None),
            handling((signal.SIGTSTP,), screen.suspend),
            contextlib.redirect_stderr(said),
        ):
            try:
                screen.begin()
                yield screen
            finally:
                # A further signal must not interrupt this.
                for number in ends:
                    signal.signal(number, signal.SIG_IGN)
                screen.end()
    finally:
        signal.set_wakeup_fd(woken)
        for fd in screen.pipe:
            os.close(fd)
        sys.stderr.write(said.getvalue())
