"""The use of CPUs and GPUs that ``--monitor`` sampled on the hosts of a run, summed up."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.rundir.layout import RunPaths

_MOST_BYTES = 1 << 26
"""Of all files together; of more, parts at equal distances are read."""
_PART = 1 << 16


@dataclass(slots=True)
class HostLoad:
    """Sums over the samples of one host."""

    samples: int = 0
    cpu: float = 0.0
    rss_most: int = 0
    gpus: int = 0
    gpu_values: int = 0
    gpu: float = 0.0
    gpu_memory_most: int = 0

    @property
    def cpu_percent(self) -> float:
        """Mean use of all CPUs of the host."""
        return self.cpu / max(1, self.samples)

    @property
    def gpu_percent(self) -> float | None:
        """Mean over its GPUs of the time in which a kernel ran; None without GPUs."""
        return self.gpu / self.gpu_values if self.gpu_values else None


@dataclass(slots=True)
class Loads:
    """The samples of a run."""

    hosts: dict[str, HostLoad] = field(default_factory=dict)
    partly: bool = False
    """Whether there are more samples than were read."""


def read_loads(paths: RunPaths) -> Loads:
    """Read at most 64 MiB of samples; damaged lines and unreadable files are skipped."""
    found = Loads()
    files = sorted(paths.logs.glob("monitor-*.jsonl"))
    share = _MOST_BYTES // max(1, len(files))
    for path in files:
        with suppress(OSError):
            found.partly |= path.stat().st_size > share
            _read(path, share, found)
    return found


def _read(path: Path, share: int, found: Loads) -> None:
    host: HostLoad | None = None
    for raw in _lines(path, share):
        try:
            record = json.loads(raw)
            if record["type"] == "header":
                host = found.hosts.setdefault(str(record["host"]), HostLoad())
            elif host is not None:
                _sample(record, host)
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            continue  # torn, damaged or cut off


def _sample(record: dict[str, Any], host: HostLoad) -> None:
    cpu = _finite(record["cpu_percent"])
    host.samples, host.cpu = host.samples + 1, host.cpu + cpu
    host.rss_most = max(host.rss_most, int(record["rss_bytes"]))
    gpus = record.get("gpus") or []
    host.gpus = max(host.gpus, len(gpus))
    for gpu in gpus:
        if gpu.get("memory_used_bytes") is not None:
            host.gpu_memory_most = max(host.gpu_memory_most, int(gpu["memory_used_bytes"]))
        if gpu.get("busy_percent") is not None:
            busy = _finite(gpu["busy_percent"])
            host.gpu_values, host.gpu = host.gpu_values + 1, host.gpu + busy


def _finite(value: Any) -> float:
    """Return a number; ValueError if it cannot be drawn."""
    if not math.isfinite(number := float(value)):
        raise ValueError(number)
    return number


def _lines(path: Path, share: int) -> Iterator[bytes]:
    """The lines of a file; of a large one those of its begin and of parts of it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= share:
            yield from file
            return
        parts = max(1, share // _PART)
        for number in range(parts):
            file.seek(size * number // parts)
            data = file.read(min(_PART, share))
            lines = data.split(b"\n")
            # A part begins and ends within lines, except at the begin of the file.
            yield from lines[1 if number else 0 : -1]
