"""Sample the use of CPUs, memory, GPUs and network into a file while ranks run.

``watching`` samples from a child process. ``read_recordings`` reads the file, and ``summarise``
reduces it to means and maxima.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.gpus import GpuReader
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.processes import WARNINGS, die_with_parent, kill_group, readable
from hpc_toolkit.system.ranks import host_name

ROOT = Path("/sys/class/infiniband")
_WORD_BYTES = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words (sysfs-class-infiniband of the kernel)."""
_COUNTERS = {"sent_bytes": "port_xmit_data", "received_bytes": "port_rcv_data"}


def read_ports(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the bytes of every port since its reset, by ``device/port``; empty without ports."""
    found = {}
    for counters in sorted(root.glob("*/ports/*/counters")):
        port: dict[str, Any] = {}
        for name, file in _COUNTERS.items():
            # Reading a port that is down may fail.
            with suppress(OSError, ValueError):
                port[name] = int((counters / file).read_text(encoding="ascii")) * _WORD_BYTES
        if port:
            found[f"{counters.parts[-4]}/{counters.parts[-2]}"] = port
    return found


def load(package: str) -> Any:
    """Import psutil or pynvml. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"the monitor needs {package}, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="monitor")) from error


class Sampler:
    """Reads the host, and a process with all its descendants.

    ``pid`` is that process, by default this one. Tests replace pynvml and the directory of ports.

    Raises ConfigError if psutil or pynvml is not installed. A host without GPUs is not an error.
    """

    def __init__(
        self, *, pid: int | None = None, nvml: Any = None, infiniband: Path = ROOT
    ) -> None:
        self._psutil = load("psutil")
        self._gpus = GpuReader(nvml if nvml is not None else load("pynvml"))
        self._infiniband = infiniband
        self._process = self._psutil.Process(pid)
        self._began = time.monotonic()
        self._net = self._psutil.net_io_counters()
        self._ports = read_ports(infiniband)
        # The percentages of a call cover the time since the previous call.
        self._psutil.cpu_percent(percpu=True)

    @property
    def no_gpus(self) -> str:
        """Why no GPU is sampled; "" if NVML can be used."""
        return self._gpus.absent

    def header(self, interval_s: float) -> dict[str, Any]:
        """Return the facts that do not change, and the time of the start."""
        return {
            "type": "header",
            "format": 1,
            "host": host_name(),
            "pid": self._process.pid,
            "started": round(time.time(), 3),
            "interval_s": interval_s,
            "cpus": os.cpu_count(),
            "cpus_allowed": sorted(os.sched_getaffinity(0)),
            "memory_bytes": self._psutil.virtual_memory().total,
            "gpus": self._gpus.facts(),
            "no_gpus": self.no_gpus,
            "infiniband": list(self._ports),
        }

    def sample(self) -> dict[str, Any]:
        """Return the load since the previous sample, and the traffic since the start.

        CPU percentages cover all CPUs of the host since the previous sample. ``rss_bytes`` is the
        sum over the processes, so that memory they share counts more than once. Network,
        InfiniBand and NVLink count bytes of all processes of the host since the start.
        """
        cpus = self._psutil.cpu_percent(percpu=True)
        memory = self._psutil.virtual_memory()
        net = self._psutil.net_io_counters()
        rss, processes = self._memory_of_all()
        ports = read_ports(self._infiniband)
        return {
            "type": "sample",
            "t_s": round(time.monotonic() - self._began, 3),
            "cpu_percent": round(sum(cpus) / max(1, len(cpus)), 1),
            "each_cpu_percent": cpus,
            "rss_bytes": rss,
            "processes": processes,
            "memory_used_bytes": memory.total - memory.available,
            "net_sent_bytes": _grown(net, self._net, "bytes_sent"),
            "net_received_bytes": _grown(net, self._net, "bytes_recv"),
            "gpus": self._gpus.read(),
            "infiniband": {
                port: {name: value - self._ports[port].get(name, 0) for name, value in now.items()}
                for port, now in ports.items()
                if port in self._ports
            },
        }

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
        """Shut down NVML."""
        self._gpus.close()


def _grown(now: Any, before: Any, name: str) -> int | None:
    """Return how much a network counter grew; None on a host without interfaces."""
    known = now is not None and before is not None
    return int(getattr(now, name) - getattr(before, name)) if known else None


LEAST_INTERVAL_S = 0.05
"""Shortest interval: more frequent samples cost more than they tell."""


def record(
    sampler: Sampler, path: Path, interval_s: float, ends: Callable[[float], object]
) -> None:
    """Append a header and samples until ``ends`` returns true; it waits for a number of seconds.

    Raises OSError if a line could not be written.
    """
    fd = files.open_or_create(path, os.O_WRONLY | os.O_APPEND)
    try:
        _append(fd, sampler.header(interval_s))
        began = last = time.monotonic()
        count, over = 0, False
        while not over:
            # Count intervals from the start, so that samples do not drift; skip missed ones.
            passed = (time.monotonic() - began) // interval_s
            over = bool(ends(max(0.0, began + (passed + 1) * interval_s - time.monotonic())))
            # A CPU percentage over a very short time means nothing.
            if count and over and time.monotonic() - last < 0.1 * interval_s:
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
def watching(path: Path, interval_s: float = 1.0) -> Iterator[None]:
    """Sample this host, and this process with its descendants, into ``path`` from a child.

    A line is one JSON object: a header, then a sample every ``interval_s`` and one at the end (see
    :class:`Sampler`). An existing file is appended to, and each start writes a header. Only one
    process may write to a file.

    The child has its own process group, ignores signals that ask workers to leave, and dies with
    this process. If sampling fails, the child prints a warning on stderr and the block continues
    without it.

    Raises ConfigError if psutil or pynvml is not installed, or the interval is too short.
    """
    if not LEAST_INTERVAL_S <= interval_s < float("inf"):
        message = f"the monitor's interval must be at least {LEAST_INTERVAL_S} s, got {interval_s}"
        raise ConfigError(message, hint="1 s is usual")
    load("psutil")
    load("pynvml")
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
        for sig in (signal.SIGTERM, signal.SIGINT, *WARNINGS):
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


@dataclass(frozen=True, slots=True)
class Recording:
    """The lines of one start of a monitor."""

    header: dict[str, Any]
    """Host, CPUs, memory and GPUs, as the monitor found them."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Samples in the order of time."""


def read_recordings(path: Path) -> list[Recording]:
    """Return a recording for every start of a monitor in a file; skip damaged lines.

    A file that does not exist has no recordings.
    """
    found: list[Recording] = []
    for line in files.read_fresh(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        kind = record.get("type") if isinstance(record, dict) else None
        if kind == "header":
            found.append(Recording(record))
        elif kind == "sample" and found:
            found[-1].samples.append(record)
    return found


def summarise(recording: Recording) -> dict[str, Any]:
    """Return means and maxima over the samples; None for a value that was never sampled.

    ``gpus`` has one entry per GPU. Its ``energy_j`` is the power integrated over time by the
    trapezoid rule, from the first sample to the last; its NVLink bytes count since the start.
    """
    samples, header = recording.samples, recording.header
    last = samples[-1] if samples else {}
    return {
        "host": header.get("host"),
        "samples": len(samples),
        "seconds": last.get("t_s"),
        "cpu_percent_mean": _over(fmean, samples, "cpu_percent"),
        "rss_bytes_max": _over(max, samples, "rss_bytes"),
        "memory_used_bytes_max": _over(max, samples, "memory_used_bytes"),
        "net_sent_bytes": last.get("net_sent_bytes"),
        "net_received_bytes": last.get("net_received_bytes"),
        "infiniband": last.get("infiniband", {}),
        "gpus": [_gpu_summary(samples, index) for index in range(len(header.get("gpus", [])))],
    }


def _gpu_summary(samples: list[dict[str, Any]], index: int) -> dict[str, Any]:
    gpus = [{**one["gpus"][index], "t_s": one["t_s"]} for one in samples if one["gpus"][index:]]
    known = [(gpu["t_s"], gpu["power_w"]) for gpu in gpus if gpu.get("power_w") is not None]
    energy = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(known))
    return {
        "index": index,
        "busy_percent_mean": _over(fmean, gpus, "busy_percent"),
        "memory_used_bytes_max": _over(max, gpus, "memory_used_bytes"),
        "power_w_mean": _over(fmean, gpus, "power_w"),
        "temperature_c_max": _over(max, gpus, "temperature_c"),
        "energy_j": energy if len(known) > 1 else None,
        "nvlink_sent_bytes": _over(max, gpus, "nvlink_sent_bytes"),
        "nvlink_received_bytes": _over(max, gpus, "nvlink_received_bytes"),
    }


def _over(rule: Callable[[list[Any]], Any], samples: list[dict[str, Any]], key: str) -> Any:
    known = [one[key] for one in samples if one.get(key) is not None]
    return rule(known) if known else None
