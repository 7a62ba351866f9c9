"""What a run's jobs used of their CPUs, GPUs and memory, and other sums in bounded memory.

Slurm's accounting counts CPU time and memory of each step; the samples of ``--monitor`` show GPUs,
and stand in for the accounting where there is none. Durations of attempts and numbers in results
are summed up for a report.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import job_id
from hpc_toolkit.system.quantities import format_mem, format_size
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row


FIELDS = (
    *("JobIDRaw", "Start", "End", "ElapsedRaw", "AllocCPUS", "NNodes", "NTasks", "TotalCPU"),
    *("AveCPU", "MaxRSS", "AllocTRES"),
)
"""Columns of ``sacct --parsable2 --noheader --duplicates``, steps included."""
_ROOM = 1.2
"""Memory that is recommended, by the memory that was used: sacct samples it every 30 s."""
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(slots=True, kw_only=True)
class _Job:
    """One run of a job: its allocation, and its steps as (start, end, bytes on a node)."""

    cpus: int
    cpu_seconds: float
    nodes: int
    memory: int
    """Bytes of all nodes; 0 if the accounting does not say."""
    used_s: float = 0.0
    tasks: int = 0
    steps: list[tuple[str, str, int]] = field(default_factory=list)

    def peak(self) -> int:
        """Bytes on a node at most: all tasks of steps that overlap in time, at their peaks."""
        return max(
            (
                sum(most for start, end, most in self.steps if start <= at < max(end, start + "!"))
                for at, _, _ in self.steps
            ),
            default=0,
        )


class Efficiency(Record, kw_only=True):
    """What jobs used; None where nothing was measured."""

    cpu: float | None
    """Share of the CPU time of the allocations, from 0 to 1."""
    gpu: float | None
    """Share of the time in which a kernel ran on a GPU, mean over the GPUs."""
    memory: int | None
    """Most bytes on one node, at most."""
    of_memory: int | None
    """Bytes that the job had on that node."""
    cpus_per_task: int | None
    """CPUs per task that cover the mean use; None: those of the job."""
    mem_mib: int | None
    """MiB per node that cover the use and a fifth more; None: those of the job."""

    def line(self) -> str:
        """One line for people; "" if nothing was measured."""
        parts = [
            f"{share:.0%} of the {what}"
            for share, what in ((self.cpu, "CPUs"), (self.gpu, "GPUs"))
            if share is not None
        ]
        if self.memory:
            of = f" of {format_size(self.of_memory)}" if self.of_memory else ""
            parts.append(f"{format_size(self.memory)}{of} memory per node")
        enough = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []
        enough += [f"--mem={format_mem(self.mem_mib)}"] if self.mem_mib else []
        return ", ".join(parts) + (f"; enough: {' '.join(enough)}" if enough else "")


def efficiency(sacct: str, loads: Mapping[str, HostLoad]) -> Efficiency | None:
    """Compute what jobs used from ``sacct`` with FIELDS and from samples of hosts; None: nothing.

    A run of a job counts once it has ended. Several tasks of a step on one node count with the
    memory of the largest one each, since the accounting has no sum per node.
    """
    jobs = [job for job in _jobs(sacct.splitlines()) if job.cpu_seconds and job.steps]
    samples = sum(one.samples for one in loads.values())
    gpus = [one.gpu / one.gpu_values for one in loads.values() if one.gpu_values]
    if not jobs and not samples:
        return None
    cpu = sum(one.own_cpu for one in loads.values()) / samples / 100 if samples else None
    memory = max((one.rss_most for one in loads.values()), default=0)
    asked, tasks, mem = 0, None, 0
    if jobs:
        cpu = min(1.0, sum(one.used_s for one in jobs) / sum(one.cpu_seconds for one in jobs))
        largest = max(jobs, key=_Job.peak)
        memory, asked = largest.peak(), largest.memory // largest.nodes
        mem = math.ceil(_ROOM * memory / _SIZES["M"] / 64) * 64
        tasks = max(
            math.ceil(round(one.used_s * one.cpus / one.cpu_seconds / max(1, one.tasks), 2))
            for one in jobs
        )
        tasks = max(1, tasks)
        had = max(one.cpus // max(1, one.tasks) for one in jobs)
        tasks = tasks if tasks < had else None
    return Efficiency(
        cpu=cpu,
        gpu=sum(gpus) / len(gpus) / 100 if gpus else None,
        memory=memory or None,
        of_memory=asked or None,
        cpus_per_task=tasks,
        mem_mib=mem if memory and mem * _SIZES["M"] < asked else None,
    )


def _jobs(lines: Iterable[str]) -> list[_Job]:
    """The ended runs of jobs; each is followed by its steps."""
    found: list[_Job] = []
    ended = False
    for line in lines:
        row = dict(zip(FIELDS, line.split("|"), strict=False))
        if len(row) != len(FIELDS):
            continue
        name, _, step = row["JobIDRaw"].partition(".")
        if not step and job_id(name):
            ended = row["End"] not in ("Unknown", "")
            cpus, elapsed = _number(row["AllocCPUS"]), _number(row["ElapsedRaw"])
            memory = dict(one.partition("=")[::2] for one in row["AllocTRES"].split(","))
            found += [
                _Job(
                    cpus=cpus,
                    cpu_seconds=float(cpus * elapsed),
                    nodes=max(1, _number(row["NNodes"])),
                    memory=_bytes(memory.get("mem", "")),
                )
            ] * ended
        elif step and ended:
            _add_step(found[-1], step, row)
    return found


def _add_step(job: _Job, step: str, row: dict[str, str]) -> None:
    tasks, nodes = max(1, _number(row["NTasks"])), max(1, _number(row["NNodes"]))
    # TotalCPU lacks tasks that were killed; AveCPU, a mean over the tasks, is sampled.
    job.used_s += max(_seconds(row["TotalCPU"]), tasks * _seconds(row["AveCPU"]))
    on_a_node = -(-tasks // nodes) * _bytes(row["MaxRSS"])
    job.steps.append((row["Start"], row["End"], on_a_node))
    if step.isdigit():
        job.tasks = max(job.tasks, tasks)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _seconds(text: str) -> float:
    """Seconds from ``[DAYS-][HOURS:]MINUTES:SECONDS[.MS]``; 0 for no text."""
    days, _, clock = text.rpartition("-")
    try:
        units = [float(one) for one in clock.split(":")]
    except ValueError:
        return 0.0
    return _number(days) * 86400.0 + sum(one * 60.0**at for at, one in enumerate(reversed(units)))


def _bytes(text: str) -> int:
    """Bytes from ``123456K``; 0 for no text."""
    unit = text[-1:] if text[-1:] in _SIZES else ""
    try:
        return round(float(text.removesuffix(unit)) * _SIZES[unit])
    except ValueError:
        return 0


_PER_DECADE = 60
ACCURACY = 10 ** (0.5 / _PER_DECADE) - 1
"""Largest relative error of a quantile, because durations are counted in classes."""
_LEAST_S = 1e-6
_GROUP_CHARS = 120
_MOST_BYTES = 1 << 26
"""Of all files together whose samples are decoded."""


@dataclass(slots=True)
class Durations:
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
    allowed: tuple[int, ...] = ()
    """Numbers of the CPUs that the job had; empty for all."""
    own_cpu: float = 0.0
    """Percent of these CPUs that were used."""
    rss_most: int = 0
    gpu_values: int = 0
    gpu: float = 0.0
    """Percent of the time in which a kernel ran, of all GPUs."""


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
    each = record.get("each_cpu_percent") or []
    own = [_finite(each[one]) for one in host.allowed if one < len(each)]
    own = own or [_finite(record["cpu_percent"])]
    host.samples += 1
    host.own_cpu += sum(own) / len(own)
    host.rss_most = max(host.rss_most, int(record["rss_bytes"]))
    for gpu in record.get("gpus") or []:
        if gpu.get("busy_percent") is not None:
            busy = _finite(gpu["busy_percent"])
            host.gpu_values, host.gpu = host.gpu_values + 1, host.gpu + busy


def _finite(value: Any) -> float:
    """Return a number; ValueError if it cannot be drawn."""
    if not math.isfinite(number := float(value)):
        raise ValueError(number)
    return number
