"""Kernel features for processes: to die with a parent, and to wait for other processes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

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


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of a process, from /proc (proc(5)); without zombies."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text(encoding="ascii", errors="replace")
            state, parent = text.rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
