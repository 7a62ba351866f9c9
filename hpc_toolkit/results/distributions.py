"""Sums in bounded memory for a report: durations of attempts by group, numbers in results, and the
use of CPUs and GPUs that ``--monitor`` sampled.
"""

from __future__ import annotations

import json
import math
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpc_toolkit.results.tables import Row
    from hpc_toolkit.rundir.layout import RunPaths

_PER_DECADE = 60
ACCURACY = 10 ** (0.5 / _PER_DECADE) - 1
"""Largest relative error of a quantile, because durations are counted in classes."""
_LEAST_S = 1e-6
_GROUP_CHARS = 120
_MOST_BYTES = 1 << 26
"""Of all files together whose samples are decoded."""


@dataclass(slots=True)
class Durations:
    """The durations of some attempts."""

    count: int = 0
    total_s: float = 0.0
    least_s: float = math.inf
    most_s: float = 0.0
    classes: dict[int, int] = field(default_factory=dict)
    """Number of durations by their logarithm."""

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.least_s, self.most_s = min(self.least_s, seconds), max(self.most_s, seconds)
        key = math.floor(math.log10(max(seconds, _LEAST_S)) * _PER_DECADE)
        self.classes[key] = self.classes.get(key, 0) + 1

    def quantile(self, share: float) -> float:
        """A duration that is longer than this share of them; 0 without any."""
        rank, seen = share * self.count, 0
        for key in sorted(self.classes):
            seen += self.classes[key]
            if seen >= rank:
                middle = 10 ** ((key + 0.5) / _PER_DECADE)
                return min(max(middle, self.least_s), self.most_s)
        return self.most_s


def group_name(group: Any) -> str:
    """A group as people read it, shortened; "" without groups."""
    if group is None:
        return ""
    text = group if isinstance(group, str) else json.dumps(group, ensure_ascii=False)
    return text if len(text) <= _GROUP_CHARS else f"{text[: _GROUP_CHARS - 3]}..."


class Range:
    """The values of one result."""

    def __init__(self) -> None:
        self.count, self.least, self.most = 0, math.inf, -math.inf
        self.some = array("d")
        """Every value; of more than 131,072 those at equal distances."""
        self._every = 1

    def add(self, value: float) -> None:
        if self.count % self._every == 0:
            self.some.append(value)
            if len(self.some) > 1 << 17:
                self.some, self._every = self.some[::2], 2 * self._every
        self.count += 1
        self.least, self.most = min(self.least, value), max(self.most, value)


def ranges_of(rows: Iterable[Row], *, most: int) -> dict[str, Range]:
    """The range of each number, by its name; of very many names, of the first ``most``."""
    found: dict[str, Range] = {}
    for row in rows:
        whole = row["value"]
        for name, value in _numbers(whole if isinstance(whole, dict) else {"value": whole}):
            if name not in found and len(found) < most:
                found[name] = Range()
            if name in found:
                found[name].add(value)
    return found


def _numbers(value: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a result, those in objects with the keys that lead to them."""
    for key, one in value.items():
        if isinstance(one, dict):
            yield from _numbers(one, f"{before}{key}.")
        elif isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < math.inf:
            with suppress(OverflowError):
                yield f"{before}{key}", float(one)


@dataclass(slots=True)
class HostLoad:
    """Sums over the samples of one host."""

    samples: int = 0
    cpu: float = 0.0
    allowed: tuple[int, ...] = ()
    """Numbers of the CPUs that the job had; empty for all."""
    own_cpu: float = 0.0
    """As ``cpu``, of these alone."""
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


def read_loads(paths: RunPaths) -> dict[str, HostLoad]:
    """Read the samples of each host; of very long files every n-th one, of damaged lines none."""
    found: dict[str, HostLoad] = {}
    files = sorted(paths.logs.glob("monitor-*.jsonl"))
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            step = 1 + path.stat().st_size * len(files) // _MOST_BYTES
            # A file has one header, its first line.
            host = HostLoad()
            for line in islice(file, 0, None, step):
                with suppress(ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
                    record = json.loads(line)
                    if record["type"] == "header":
                        host = found.setdefault(str(record["host"]), host)
                        host.allowed = tuple(record.get("cpus_allowed") or ())
                    else:
                        _add_sample(record, host)
    return found


def _add_sample(record: dict[str, Any], host: HostLoad) -> None:
    cpu = _finite(record["cpu_percent"])
    each = record.get("each_cpu_percent") or []
    own = [_finite(each[one]) for one in host.allowed if one < len(each)] or [cpu]
    host.samples, host.cpu = host.samples + 1, host.cpu + cpu
    host.own_cpu += sum(own) / len(own)
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
