"""The share of its CPUs, GPUs and memory that a run's jobs used, and what would have been enough.

Slurm's accounting counts CPU time and memory of each step; the monitor's samples show GPUs, and
stand in for the accounting where there is none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.records import job_id
from hpc_toolkit.system.quantities import format_mem, format_size
from hpc_toolkit.system.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hpc_toolkit.results.distributions import HostLoad

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
    gpus = [one.gpu_percent for one in loads.values() if one.gpu_percent is not None]
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
        tasks = max(_cpus_per_task(one) for one in jobs)
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


def _cpus_per_task(job: _Job) -> int:
    elapsed_s = job.cpu_seconds / job.cpus
    return max(1, math.ceil(round(job.used_s / elapsed_s / max(1, job.tasks), 2)))


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
