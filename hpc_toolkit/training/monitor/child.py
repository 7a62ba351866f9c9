"""The monitor as a child process, for a process that forks and must have no threads."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from hpc_toolkit.system.processes import die_with_parent, kill_group, readable
from hpc_toolkit.training.monitor.gpus import load_nvml
from hpc_toolkit.training.monitor.recorder import check_interval, record
from hpc_toolkit.training.monitor.sampler import Sampler, load_psutil

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_END_S = 5.0
"""How long the child may take for its last sample; a driver may never answer."""


@contextmanager
def watching(path: Path, interval_s: float = 1.0) -> Iterator[None]:
    """Sample this host, and this process with its descendants, into ``path`` from a child.

    The format is that of :class:`hpc_toolkit.training.monitor.Monitor`. The child has its own
    process group, ignores signals that ask workers to leave, and dies with this process. If
    sampling fails, the child prints a warning on stderr and the block continues without it.

    Raises:
        ConfigError: psutil or pynvml is not installed, or the interval is too short.
    """
    check_interval(interval_s)
    load_psutil()
    load_nvml()
    sys.stderr.flush()
    ends, end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _sample(path, interval_s, ends, parent)
    os.close(ends)
    with suppress(OSError):
        os.setpgid(pid, pid)
    try:
        yield
    finally:
        # Closing the pipe is not enough, because forked workers hold it open as well.
        with suppress(BrokenPipeError):
            os.write(end, b"x")
        os.close(end)
        _reap(pid)


def _reap(pid: int) -> None:
    ended = os.pidfd_open(pid)
    if not readable(ended, timeout_s=_END_S):
        kill_group(pid)
    os.close(ended)
    os.waitpid(pid, 0)


def _sample(path: Path, interval_s: float, ends: int, parent: int) -> None:
    """Sample in the child until the parent writes to ``ends``; never return."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        # The parent ends this process; Slurm's signals to every process of a step are for ranks.
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(sig, signal.SIG_IGN)
        if os.getppid() == parent:
            sampler = Sampler(pid=parent)
            if sampler.no_gpus:
                sys.stderr.write(f"note: the monitor samples no GPUs: {sampler.no_gpus}\n")
            record(sampler, path, interval_s, lambda wait_s: readable(ends, timeout_s=wait_s))
        code = 0
    except BaseException as error:  # noqa: BLE001 - nothing may run on in the parent's stack
        sys.stderr.write(f"warning: the monitor stopped: {error}\n")
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
