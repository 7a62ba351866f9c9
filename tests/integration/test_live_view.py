"""``hpctk status --watch`` on a terminal: resizes, and what it leaves behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.submit import RunJob, own_login, record_job
from hpc_toolkit.system.processes import readable
from tests.integration.realrun import HANG_S, Hpctk
from tests.toyrun import ToyRun

ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


class Terminal:
    """A pseudo-terminal in which a command runs."""

    def __init__(self, *words: object, env: dict[str, str], columns: int = 80, rows: int = 24):
        self._master, slave = pty.openpty()
        self._resize(columns, rows)
        self.modes = termios.tcgetattr(slave)
        self.pid = os.fork()
        if self.pid == 0:
            os.login_tty(slave)
            os.execve(sys.executable, [sys.executable, "-m", "hpc_toolkit", *map(str, words)], env)
        self._slave = slave
        self.text = ""
        self.code: int | None = None

    def shown(self, pattern: str, since: int = 0) -> int:
        """Wait until the command has written this; return the length of its output by then."""
        end = time.monotonic() + HANG_S
        while not re.search(pattern, self.text[since:]):
            assert self.code is None, f"it ended without {pattern}: {self.text[since:]!r}"
            assert time.monotonic() < end, f"waited for {pattern}: {self.text[since:]!r}"
            self.read()
        return len(self.text)

    def read(self) -> None:
        if readable(self._master, timeout_s=0.1):
            with suppress(OSError):
                self.text += os.read(self._master, 1 << 16).decode()
        elif self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None

    def press(self, keys: str, pattern: str) -> None:
        """Press keys, and wait for what they show."""
        before = len(self.text)
        os.write(self._master, keys.encode())
        self.shown(pattern, before)

    def resize(self, columns: int, rows: int) -> None:
        self._resize(columns, rows)
        os.kill(self.pid, signal.SIGWINCH)

    def _resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def ended(self) -> int:
        """Wait for the end, and check that the terminal is as it was before."""
        while self.code is None:
            self.read()
        assert self.code is not None
        assert self.text.count(ENTER) == self.text.count(LEAVE) == 1
        assert self.text.rindex("\x1b[?25h") > self.text.rindex("\x1b[?25l")
        assert termios.tcgetattr(self._slave) == self.modes
        return self.code

    def close(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def watch(hpctk: Hpctk) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(run: Path, *words: object, **changes: Any) -> Terminal:
        env = hpctk.environment({"TERM": "xterm", "LANG": "C.UTF-8"})
        opened.append(Terminal("status", run, "--watch", "--no-slurm", *words, env=env, **changes))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.fixture
def toy(fast_dir: Path) -> ToyRun:
    toy = ToyRun(fast_dir / "r", 6, unit=2)
    toy.worker("w", host="there", at=time.time() + 1e6).work(
        toy.unit_name(0), i0="done", i1="permanent"
    )
    return toy


def test_a_resize_draws_the_screen_anew_and_q_quits(
    toy: ToyRun, watch: Callable[..., Terminal]
) -> None:
    terminal = watch(toy.root)
    before = terminal.shown("q quit")
    terminal.resize(40, 20)
    terminal.shown(r"\x1b\[20;1H.*q quit", before)

    terminal.press("xq", re.escape(LEAVE))

    assert terminal.ended() == 0
    # The last state stays on the terminal.
    assert "4 pending" in terminal.text.partition(LEAVE)[2]


def test_a_training_is_drawn_in_place(tmp_path: Path, watch: Callable[..., Terminal]) -> None:
    root = tmp_path / "gpt"
    root.mkdir()
    record_job(
        RunPaths(root), RunJob(job="7", name="gpt", log="%j.out", submitted=1.0, by=own_login())
    )
    terminal = watch(root)
    terminal.shown("q quit")

    (root / "checkpoints").mkdir()
    (root / "checkpoints" / "step-000000012.pt").touch()

    terminal.shown("step 12")
    terminal.press("q", re.escape(LEAVE))
    assert terminal.ended() == 0
    assert terminal.text.count("\x1b[2J") == 2  # at its begin
    assert "step 12" in terminal.text.partition(LEAVE)[2]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_restores_the_terminal(
    toy: ToyRun, watch: Callable[..., Terminal], number: int, code: int
) -> None:
    terminal = watch(toy.root)
    terminal.shown("q quit")

    os.kill(terminal.pid, number)

    assert terminal.ended() == code


def test_the_view_ends_when_the_run_does(toy: ToyRun, watch: Callable[..., Terminal]) -> None:
    terminal = watch(toy.root, "--check")
    terminal.shown("q quit")

    other = toy.worker("other", host="there", at=time.time() + 1e6)
    other.work(toy.unit_name(2), i2="done", i3="done")
    other.work(toy.unit_name(4), i4="done", i5="done")
    other.presence.update(done=4, journal=other.journal.size)

    assert terminal.ended() == 1
    assert "complete" in terminal.text.partition(LEAVE)[2]


def test_a_terminal_without_features_gets_plain_blocks(toy: ToyRun, hpctk: Hpctk) -> None:
    env = hpctk.environment({"TERM": "dumb", "LANG": "C.UTF-8"})
    terminal = Terminal("status", toy.root, "--watch", "--no-slurm", env=env)
    try:
        terminal.shown("working.*\n(.*\n)+.*working")
        assert "\x1b" not in terminal.text
    finally:
        terminal.close()


def test_work_fails_on_failed_items_if_that_is_wanted(hpctk: Hpctk) -> None:
    hpctk.make([{}], None, command="exit 1", max_attempts=1)

    assert hpctk("work", "run", "--fail-on-failed").code == 1
    assert hpctk("work", "run").code == 0
    # A rank would fail for items of others.
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    ended = hpctk("work", "run", "--fail-on-failed", env=step)
    assert ended.code == 1
    assert "error: --fail-on-failed: not available in a Slurm step" in ended.err
