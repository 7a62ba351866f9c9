"""Signals as a queue: what came is read when the process is ready for it, and none is lost."""

from __future__ import annotations

import os
import signal
from collections import deque

from hpc_toolkit.system.processes import readable


class Signals:
    """SIGUSR1, SIGTERM and SIGCHLD of this process, in the order in which they came.

    The handlers do nothing: Python writes each signal's number into a pipe. A child starts with the
    default actions, since exec resets handlers.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        self._seen: deque[int] = deque()
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def next(self, timeout_s: float | None) -> int | None:
        """The oldest signal that was not returned yet; None after ``timeout_s`` without one."""
        if not self._seen and readable(self._read, timeout_s=timeout_s):
            self._seen.extend(os.read(self._read, 4096))
        return self._seen.popleft() if self._seen else None
