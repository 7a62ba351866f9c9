"""Kernel features for processes: to die with a parent, and to wait for other processes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

WARNING = signal.SIGUSR1
"""Slurm's warning that the time limit is near; a script requests it (SIGNALLED) and traps it."""
WARNINGS = (WARNING, signal.SIGUSR2)
"""Signals by which Slurm or a user may warn a program."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent ends.

    Safe between fork and exec: it only makes one system call.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def kill_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Kill a process group, or send it another signal; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def readable(*fds: int, timeout_s: float | None = None) -> set[int]:
    """Wait for descriptors that are readable or at end of file; empty after ``timeout_s``.

    A timeout is rounded up to milliseconds; None waits for ever.
    """
    # A notebook's process may have descriptors above 1023, which select(2) does not accept.
    waiting = select.poll()
    for fd in fds:
        waiting.register(fd, select.POLLIN)
    found = waiting.poll(None if timeout_s is None else math.ceil(1000 * timeout_s))
    return {fd for fd, _ in found}


@contextlib.contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Handle these signals in the block; does nothing in a thread other than the main one."""
    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):
        for number in numbers:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none is lost."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code, which is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    named = -code in set(signal.Signals)  # most real-time signals have no name
    return f"killed by {signal.Signals(-code).name if named else f'signal {-code}'}"


def parent_of(pid: int | str) -> tuple[int, bool]:
    """Process id of a process's parent, and whether the process is a zombie (proc(5), stat)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        state, parent = file.read().rpartition(b")")[2].split(maxsplit=2)[:2]
    return int(parent), state == b"Z"


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process; without zombies."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent, ended = parent_of(name)
            if not ended:
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
