"""The whole terminal for one program: alternate screen, single keys, resizes.

Everything is restored at the end of the block, whatever ends it. The sequences are those of ECMA-48
and xterm, which every terminal since then understands; no terminal database is read.
"""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self, TextIO

from hpc_toolkit.system.processes import readable

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
