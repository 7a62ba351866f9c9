"""The guard: a process between a worker and its executor that leaves no descendant behind.

The kernel ends an executor with its parent, but not the processes that the user's code started,
and a kill of the executor's process group misses those that called setsid(2). The guard adopts
such processes (PR_SET_CHILD_SUBREAPER in prctl(2)). When the executor or its worker has ended, the
guard kills all processes that are left, and exits.
"""

from __future__ import annotations

import gc
import os
import signal
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.rundir.layout import StageSpec
from hpc_toolkit.system import processes

if TYPE_CHECKING:
    from mmap import mmap


_PID, _STATUS = 4, 8
"""Offsets in the shared memory; its first byte belongs to the executor."""
_LIFE = 3
_LOOK_S = 0.05
_COMMAND_GRACE_S = 5.0
_PATIENCE_S = 5.0
"""A process that does not end by SIGKILL, because its filesystem hangs, must not stop a worker."""


class Guard:
    """A worker's handle on a child that is guarded."""

    pid = 0
    """Process id of the guard, if this process forked it."""

    def __init__(self, shared: mmap) -> None:
        """``shared``: memory of at least 12 bytes, which the processes share."""
        self._shared = shared
        self.life, self._life = os.pipe()
        self.ended = -1
        """At end of file when the child has ended."""

    def fork(self, child: Callable[[], object], alive: int) -> None:
        """Fork a guard from this process; ``child`` must not return.

        Children of the user's code may hold the child's pipes open, so only the guard keeps
        ``alive``, the other end of ``ended``.
        """
        self.pid = os.fork()
        if self.pid == 0:
            become_guard(child, (self.life, alive), self._shared)

    @property
    def child(self) -> int:
        """Process id of the child; 0 until the guard has started it."""
        return int(struct.unpack_from("i", self._shared, _PID)[0])

    def terminate(self) -> None:
        """Ask the child's descendants to end by SIGTERM; the child itself gets no signal."""
        for pid in processes.descendants(self.child) if self.child else ():
            with suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def end(self) -> str:
        """Kill the child and all its descendants; return how the child ended."""
        os.close(self._life)
        if self.pid:
            os.waitpid(self.pid, 0)
        while not self.pid and os.read(self.ended, 64):
            continue
        os.close(self.ended)
        known, status = struct.unpack_from("?i", self._shared, _STATUS)
        if not known:  # somebody killed the guard, and the kernel the child
            if self.child:
                processes.kill_group(self.child)
            return "killed by SIGKILL"
        return processes.describe_exit(os.waitstatus_to_exitcode(status))


def become_guard(child: Callable[[], object], ends: tuple[int, int], shared: mmap) -> None:
    """Start the child, and wait for its end or the worker's; never returns.

    ``ends``: the pipe that ends with the worker, and the one that ends with this process.
    """
    try:
        os.setpgid(0, 0)
        # Slurm signals every process of a step.
        for sig in processes.STOP_SIGNALS:
            signal.signal(sig, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        processes.adopt_orphans()
        guard = os.getpid()
        pid = os.fork()
        if pid == 0:
            processes.die_with_parent()
            if os.getppid() == guard:
                child()
            os._exit(0)
        struct.pack_into("i", shared, _PID, pid)
        gc.disable()  # a collection would copy the memory that is shared with the worker
        _watch(pid, ends, shared)
    finally:
        os._exit(0)


def _watch(child: int, ends: tuple[int, int], shared: mmap) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    processes.keep_descriptors(null, null, null, *ends)
    wake, wake_write = os.pipe()
    for fd in (wake, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    statuses: list[int] = []
    while _reap(child, statuses) and not statuses:
        if _LIFE in processes.readable(_LIFE, wake):
            os.kill(child, signal.SIGKILL)
            statuses.append(os.waitpid(child, 0)[1])
        _drain(wake)
    struct.pack_into("?i", shared, _STATUS, True, statuses[0])
    processes.kill_group(child)
    end = time.monotonic() + _PATIENCE_S
    while _reap(child, statuses) and time.monotonic() < end:
        for pid in processes.descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        processes.readable(wake, timeout_s=_LOOK_S)
        _drain(wake)


def _drain(wake: int) -> None:
    with suppress(BlockingIOError):
        os.read(wake, 4096)


def _reap(child: int, statuses: list[int]) -> bool:
    """Reap the processes that have ended, and note the child's status; whether any is left."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                statuses.append(ended[1])
        return True
    return False


def kill_after(spec: StageSpec) -> float:
    """Seconds from SIGTERM to SIGKILL for an item whose time is up."""
    if spec.kill_after_s is not None:
        return spec.kill_after_s
    return _COMMAND_GRACE_S if spec.workload.command is not None else 0.0
