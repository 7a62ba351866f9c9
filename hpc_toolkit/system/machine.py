"""The part of this machine that a process may use: CPUs by NUMA node, GPUs, memory."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.record import Record, fresh

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MIB = 2**20


class Machine(Record, kw_only=True):
    """The part of this machine that this process, its container and its Slurm job may use."""

    nodes: dict[int, tuple[int, ...]]
    """Usable CPUs by NUMA node; the hardware threads of one core are adjacent."""
    cpu_quota: float | None = None
    """CPU time that the control group grants, in CPUs; None: no limit."""
    memory_bytes: int
    """The smallest of installed memory, the control group's limit and Slurm's grant."""
    gpus: tuple[str, ...] = ()
    """GPUs as CUDA_VISIBLE_DEVICES names them."""
    gpu_nodes: dict[str, int] = fresh(factory=dict)
    """The NUMA node of each GPU for which it is known."""

    @property
    def cpus(self) -> int:
        return sum(map(len, self.nodes.values()))


def read_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Read what this process may use.

    ``root`` holds the /proc and /sys to read; CPU affinity and GPUs are always this process's own.
    """
    allowed = os.sched_getaffinity(0)
    quota, memory = _group_limits(root)
    gpus = tuple(visible_gpus())
    limits = [_built_in_bytes(root), memory, _granted_bytes(environ, len(allowed))]
    return Machine(
        nodes=_nodes(root, allowed),
        cpu_quota=quota,
        memory_bytes=min(limit for limit in limits if limit is not None),
        gpus=gpus,
        gpu_nodes=_gpu_nodes(root, gpus),
    )


def _nodes(root: Path, allowed: set[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = allowed.intersection(parse_cpus(_read(path / "cpulist")))
        if cpus:  # a node may have memory but no CPUs
            found[int(path.name[4:])] = tuple(sorted(cpus, key=lambda cpu: _core(root, cpu)))
    rest = allowed.difference(*found.values())
    if rest:  # a kernel without NUMA
        found[0] = (*found.get(0, ()), *sorted(rest, key=lambda cpu: _core(root, cpu)))
    return dict(sorted(found.items()))


def _core(root: Path, cpu: int) -> tuple[int, int]:
    """Sort key that puts the hardware threads of one core next to each other."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    siblings = parse_cpus(_read(path))
    return (min(siblings) if siblings else cpu), cpu


def parse_cpus(text: str) -> list[int]:
    """Parse a list of CPUs in the kernel's notation, such as ``0-3,8``."""
    found: list[int] = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def format_cpus(cpus: tuple[int, ...]) -> str:
    """Write CPUs in the kernel's notation, the reverse of :func:`parse_cpus`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


def _built_in_bytes(root: Path) -> int:
    match = re.search(r"^MemTotal: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else 2**63


def _granted_bytes(environ: Mapping[str, str], cpus: int) -> int | None:
    """Memory that Slurm granted on this node; None for no limit, also where Slurm says 0."""
    node, cpu = (environ.get(f"SLURM_MEM_PER_{name}", "") for name in ("NODE", "CPU"))
    mib = int(node) if node.isdigit() else int(cpu) * cpus if cpu.isdigit() else 0
    return mib * _MIB or None


def _group_limits(root: Path) -> tuple[float | None, int | None]:
    """The lowest limits, (CPUs, bytes), of this process's control groups and their ancestors."""
    cpus: list[float] = []
    sizes: list[int] = []
    for kind, path in _groups(root):
        if kind == "":
            quota, _, period = _read(path / "cpu.max").strip().partition(" ")
            limit = _read(path / "memory.max").strip()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes")
            quota, period, limit = (_read(path / name).strip() for name in names)
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / int(period))
        if limit.isdigit():
            sizes.append(int(limit))
    return min(cpus, default=None), min(sizes, default=None)


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (controller, path) of this process's control groups and ancestors; "" for version 2."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, name = line.split(":", 2)
        kinds = [kind for kind in names.split(",") if kind in ("", "memory", "cpu")]
        for kind in kinds:
            top = root / "sys/fs/cgroup" / kind
            path = top / name.lstrip("/")
            # In a container the path may be the host's, and the host's groups are not visible.
            for group in (path, *path.parents):
                yield kind, group
                if group == top:
                    break


def _gpu_nodes(root: Path, gpus: tuple[str, ...]) -> dict[str, int]:
    """NUMA nodes of the GPUs, known only if this process sees all GPUs of the machine.

    If it sees fewer, their indices do not identify the devices.
    """
    with suppress(OSError):
        buses = sorted(path.name for path in (root / "proc/driver/nvidia/gpus").iterdir())
        if sorted(gpus) == sorted(map(str, range(len(buses)))):
            nodes = [_read(root / f"sys/bus/pci/devices/{bus.lower()}/numa_node") for bus in buses]
            # The kernel shows -1 if the firmware does not name a node.
            return {gpu: int(nodes[int(gpu)]) for gpu in gpus if nodes[int(gpu)].strip().isdigit()}
    return {}


def _read(path: Path) -> str:
    """The contents of a kernel file; "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace")
    return ""
