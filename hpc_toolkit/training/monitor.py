"""Sample the use of CPUs, memory and GPUs into a file while ranks run, from a child process."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.processes import WARNINGS, die_with_parent, kill_group, readable
from hpc_toolkit.system.ranks import host_name

INTERVAL_S = 1.0


def load(package: str) -> Any:
    """Import psutil or pynvml. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"the monitor needs {package}, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="monitor")) from error


class Sampler:
    """Reads the host, and a process with all its descendants.

    ``pid`` is that process, by default this one. Tests replace pynvml.

    Raises ConfigError if psutil or pynvml is not installed. A host without GPUs is not an error.
    """

    def __init__(self, *, pid: int | None = None, nvml: Any = None) -> None:
        self._psutil = load("psutil")
        self._nvml = nvml if nvml is not None else load("pynvml")
        self._process = self._psutil.Process(pid)
        self._gpus: list[Any] = []
        self.no_gpus = ""
        """Why no GPU is sampled; "" if NVML can be used."""
        try:
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._gpus = list(map(self._nvml.nvmlDeviceGetHandleByIndex, range(count)))
        except self._nvml.NVMLError as error:
            self.no_gpus = str(error)
        # The percentages of a call cover the time since the previous call.
        self._psutil.cpu_percent(percpu=True)

    def header(self) -> dict[str, Any]:
        """Return the facts that do not change, and the time of the start."""
        return {
            "type": "header",
            "format": 1,
            "host": host_name(),
            "pid": self._process.pid,
            "started": round(time.time(), 3),
            "cpus_allowed": sorted(os.sched_getaffinity(0)),
            "no_gpus": self.no_gpus,
        }

    def sample(self) -> dict[str, Any]:
        """Return the load since the previous sample.

        CPU percentages cover all CPUs of the host. ``rss_bytes`` is the sum over the processes, so
        that memory they share counts more than once. ``busy_percent`` is the share of the driver's
        last sample period in which some kernel ran on a GPU; None if a GPU does not report it.
        """
        cpus = self._psutil.cpu_percent(percpu=True)
        rss, processes = self._memory_of_all()
        return {
            "type": "sample",
            "at": round(time.time(), 3),
            "cpu_percent": round(sum(cpus) / max(1, len(cpus)), 1),
            "each_cpu_percent": cpus,
            "rss_bytes": rss,
            "processes": processes,
            "gpus": [
                {
                    "busy_percent": self._ask("nvmlDeviceGetUtilizationRates", handle, "gpu"),
                    "memory_used_bytes": self._ask("nvmlDeviceGetMemoryInfo", handle, "used"),
                }
                for handle in self._gpus
            ],
        }

    def _ask(self, question: str, handle: Any, field: str) -> int | None:
        """Return a field of the answer; None if the GPU does not have it, or is lost."""
        with suppress(self._nvml.NVMLError):
            return getattr(getattr(self._nvml, question)(handle), field, None)
        return None

    def _memory_of_all(self) -> tuple[int, int]:
        """Return the resident bytes of the process and its descendants, and their number."""
        rss = count = 0
        try:
            family = [self._process, *self._process.children(recursive=True)]
        except self._psutil.Error:
            return 0, 0
        for process in family:
            if process.pid == os.getpid() != self._process.pid:
                continue  # the monitor's own child
            try:
                rss += process.memory_info().rss
                count += 1
            except self._psutil.Error:  # it ended in between
                continue
        return rss, count

    def close(self) -> None:
        if not self.no_gpus:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()


def record(sampler: Sampler, path: Path, ends: Callable[[float], object]) -> None:
    """Append a header and samples until ``ends`` returns true; it waits for a number of seconds.

    Raises OSError if a line could not be written.
    """
    fd = files.open_or_create(path, os.O_WRONLY | os.O_APPEND)
    try:
        _append(fd, sampler.header())
        began = last = time.monotonic()
        count, over = 0, False
        while not over:
            # Count intervals from the start, so that samples do not drift; skip missed ones.
            passed = (time.monotonic() - began) // INTERVAL_S
            over = bool(ends(max(0.0, began + (passed + 1) * INTERVAL_S - time.monotonic())))
            # A CPU percentage over a very short time means nothing.
            if count and over and time.monotonic() - last < 0.1 * INTERVAL_S:
                break
            _append(fd, sampler.sample())
            last, count = time.monotonic(), count + 1
    finally:
        os.close(fd)
        sampler.close()


def _append(fd: int, line: dict[str, Any]) -> None:
    files.write_all(fd, json.dumps(line, separators=(",", ":")).encode() + b"\n")


_END_S = 5.0
"""How long the child may take for its last sample; a driver may never answer."""


@contextmanager
def watching(path: Path) -> Iterator[None]:
    """Sample this host, and this process with its descendants, into ``path`` from a child.

    A line is one JSON object: a header, then a sample every second and one at the end (see
    :class:`Sampler`). An existing file is appended to, and each start writes a header. Only one
    process may write to a file.

    The child has its own process group, ignores signals that ask workers to leave, and dies with
    this process. If sampling fails, the child prints a warning on stderr and the block continues
    without it.

    Raises ConfigError if psutil or pynvml is not installed.
    """
    load("psutil")
    load("pynvml")
    sys.stderr.flush()
    ends, end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _sample(path, ends, parent)
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
        ended = os.pidfd_open(pid)
        if not readable(ended, timeout_s=_END_S):
            kill_group(pid)
        os.close(ended)
        os.waitpid(pid, 0)


def _sample(path: Path, ends: int, parent: int) -> None:
    """Sample in the child until the parent writes to ``ends``; never return."""
    code = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        # The parent ends this process; Slurm's signals to every process of a step are for ranks.
        for sig in (signal.SIGTERM, signal.SIGINT, *WARNINGS):
            signal.signal(sig, signal.SIG_IGN)
        if os.getppid() == parent:
            sampler = Sampler(pid=parent)
            if sampler.no_gpus:
                sys.stderr.write(f"note: the monitor samples no GPUs: {sampler.no_gpus}\n")
            record(sampler, path, lambda wait_s: readable(ends, timeout_s=wait_s))
        code = 0
    except BaseException as error:  # noqa: BLE001 - nothing may run on in the parent's stack
        sys.stderr.write(f"warning: the monitor stopped: {error}\n")
    finally:
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
