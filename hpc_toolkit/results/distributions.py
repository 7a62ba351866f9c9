"""Sums in bounded memory for a report: durations of attempts by group, numbers in results, and the
use of CPUs and GPUs that ``--monitor`` sampled.
"""

from __future__ import annotations

import json
import math
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hpc_toolkit.results.tables import Row
    from hpc_toolkit.rundir.layout import RunPaths

_PER_DECADE = 60
ACCURACY = 10 ** (0.5 / _PER_DECADE) - 1
"""Largest relative error of a quantile, because durations are counted in classes."""
_LEAST_S = 1e-6
_MOST_GROUPS = 2_000
_GROUP_CHARS = 120
OTHERS = "(other groups)"
_MOST_BYTES = 1 << 26
"""Of all files together; of more, parts at equal distances are read."""
_PART = 1 << 16


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


class GroupDurations:
    """Durations by stage and group; groups beyond the first 2,000 are counted together."""

    def __init__(self) -> None:
        self.all: dict[tuple[str, str], Durations] = {}
        """By stage, and the group's JSON; "" without groups."""

    def add(self, stage: str, group: Any, seconds: float) -> None:
        name = "" if group is None else group_name(group)
        found = self.all.get((stage, name))
        if found is None:
            key = (stage, OTHERS if len(self.all) >= _MOST_GROUPS else name)
            found = self.all.setdefault(key, Durations())
        found.add(seconds)

    def of(self, stage: str, group: Any) -> Durations | None:
        return self.all.get((stage, "" if group is None else group_name(group)))

    def ranked(self, most: int) -> list[tuple[str, str, Durations]]:
        """Stage, group and durations, by the time that all of its attempts took."""
        order = sorted(self.all.items(), key=lambda one: (one[0][1] == OTHERS, -one[1].total_s))
        return [(stage, name, found) for (stage, name), found in order[:most]]


def group_name(group: Any) -> str:
    """A group as people read it, shortened."""
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
