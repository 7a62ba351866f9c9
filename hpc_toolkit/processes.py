"""What a child process needs of the kernel: to die with its parent, its own children with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``sig`` to this process when its parent ends.

    Safe between fork and exec: it only makes one system call.
    """
    _prctl(_PR_SET_PDEATHSIG, int(sig))


def kill_group(leader: int) -> None:
    """Kill a process group, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
