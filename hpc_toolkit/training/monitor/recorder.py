"""Write samples to a file from a child process, and summarise the file."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.files import read_fresh
from hpc_toolkit.system.processes import die_with_parent, kill_group, readable
from hpc_toolkit.training.monitor.sampler import Sampler, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LEAST_INTERVAL_S = 0.05
"""Shortest interval: more frequent samples cost more than they tell."""


def record(
    sampler: Sampler, path: Path, interval_s: float, ends: Callable[[float], object]
) -> None:
    """Append a header and samples until ``ends`` returns true; it waits for a number of seconds.

    Raises:
        OSError: a line could not be written.
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
    :class:`hpc_toolkit.training.monitor.sampler.Sampler`). An existing file is appended to, and
    each start writes a header. Only one process may write to a file.

    The child has its own process group, ignores signals that ask workers to leave, and dies with
    this process. If sampling fails, the child prints a warning on stderr and the block continues
    without it.

    Raises:
        ConfigError: psutil or pynvml is not installed, or the interval is too short.
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
    for line in read_fresh(path).splitlines():
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
    trapezoid rule, from the first sample to the last.
    """
    samples = recording.samples
    last = samples[-1] if samples else {}
    return {
        "host": recording.header.get("host"),
        "samples": len(samples),
        "seconds": last.get("t_s"),
        "cpu_percent_mean": _mean([one.get("cpu_percent") for one in samples]),
        "rss_bytes_max": _greatest([one.get("rss_bytes") for one in samples]),
        "memory_used_bytes_max": _greatest([one.get("memory_used_bytes") for one in samples]),
        "net_sent_bytes": last.get("net_sent_bytes"),
        "net_received_bytes": last.get("net_received_bytes"),
        "infiniband": last.get("infiniband", {}),
        "gpus": [
            _gpu_summary(samples, index) for index in range(len(recording.header.get("gpus", [])))
        ],
    }


def _gpu_summary(samples: list[dict[str, Any]], index: int) -> dict[str, Any]:
    read = [(one["t_s"], one["gpus"][index]) for one in samples if len(one["gpus"]) > index]

    def each(name: str) -> list[Any]:
        return [gpu.get(name) for _, gpu in read]

    known = [(at, gpu["power_w"]) for at, gpu in read if gpu.get("power_w") is not None]
    energy = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(known))
    return {
        "index": index,
        "busy_percent_mean": _mean(each("busy_percent")),
        "memory_used_bytes_max": _greatest(each("memory_used_bytes")),
        "power_w_mean": _mean(each("power_w")),
        "temperature_c_max": _greatest(each("temperature_c")),
        "energy_j": energy if len(known) > 1 else None,
    }


def _mean(values: list[Any]) -> Any:
    return _over(values, lambda known: sum(known) / len(known))


def _greatest(values: list[Any]) -> Any:
    return _over(values, max)


def _over(values: list[Any], rule: Callable[[list[Any]], Any]) -> Any:
    known = [value for value in values if value is not None]
    return rule(known) if known else None
