"""The part of this machine that a process may use, and its division among workers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.gpus import CUDA, rank_here, ranks_here, visible_gpus
from hpc_toolkit.system.quantities import counted, format_cpus, format_size, parse_cpus
from hpc_toolkit.system.record import Record, fresh

MEMORY = "HPCTK_MEMORY_PER_WORKER"
"""Environment variable: bytes that each process of an executor may allocate."""
LEAST_MEMORY_BYTES = 64 * 2**20
"""With less memory the Python interpreter does not start."""


class Shares(Record, kw_only=True):
    """The resources that each worker gets; None: no share was requested."""

    cpus: int | None = None
    """CPUs as the kernel counts them: hardware threads, where a core has several."""
    gpus: float | None = None
    """A whole number of GPUs, or a fraction of one shared GPU; 0: no GPU."""
    memory_bytes: int | None = None
    """Bytes that each process of the worker's executor may allocate."""
    divided: bool = False
    """Divide all CPUs and GPUs equally; the first worker also gets those that are left over."""

    def __post_init__(self) -> None:
        """Reject invalid shares. Raises ConfigError: names the option."""
        if self.cpus is not None and self.cpus < 1:
            message = f"--cpus-per-worker must be at least 1, got {self.cpus}"
            raise ConfigError(message, hint="leave it out to bind no CPUs")
        if self.gpus is not None and not (0 <= self.gpus < 1 or self.gpus % 1 == 0 < self.gpus):
            message = f"--gpus-per-worker must be 0, a fraction below 1 or whole, got {self.gpus:g}"
            raise ConfigError(message, hint="0.5 lets two workers share a GPU")
        if self.memory_bytes is not None and self.memory_bytes < LEAST_MEMORY_BYTES:
            size, least = format_size(self.memory_bytes), format_size(LEAST_MEMORY_BYTES)
            message = f"--memory-per-worker must be at least {least}, got {size}"
            raise ConfigError(message, hint="such as --memory-per-worker 4G")

    def __bool__(self) -> bool:
        given = (self.cpus, self.gpus, self.memory_bytes) != (None, None, None)
        return given or self.divided

    @property
    def sharing(self) -> int:
        """Number of workers that share one GPU; 0.333 counts as 1/3, so three workers fit."""
        return int(1 / self.gpus + 1e-3) if self.gpus is not None and 0 < self.gpus < 1 else 1

    def workers_on(self, gpus: int) -> int:
        """Number of workers that ``gpus`` GPUs are enough for; at least 1."""
        if self.gpus == 0:
            return 1
        return max(1, gpus * self.sharing // max(1, int(self.gpus or 1)))

    def to_options(self) -> list[str]:
        size = self.memory_bytes and f"{self.memory_bytes}B"
        named = {"cpus": self.cpus, "gpus": self.gpus, "memory": size}
        given = [(name, str(one)) for name, one in named.items() if one is not None]
        return [word for name, one in given for word in (f"--{name}-per-worker", one)]


class Place(Record, kw_only=True):
    """The CPUs, GPUs and memory of one worker."""

    cpus: tuple[int, ...] = ()
    """Its CPUs; empty: it is not bound."""
    nodes: tuple[int, ...] = ()
    """The NUMA nodes of these CPUs."""
    gpus: tuple[str, ...] | None = None
    """Its GPUs, as CUDA_VISIBLE_DEVICES names them; None: the variable is unset or unchanged."""
    memory_bytes: int | None = None
    """Bytes that each process of its executor may allocate; None: hpctk sets no limit."""

    def __str__(self) -> str:
        parts = []
        if self.cpus:
            named = "NUMA node " if len(self.nodes) == 1 else "NUMA nodes "
            nodes = f" ({named}{','.join(map(str, self.nodes))})" if self.nodes else ""
            parts.append(f"CPUs {format_cpus(self.cpus)}{nodes}")
        if self.gpus is not None:
            parts.append(f"GPUs {','.join(self.gpus)}" if self.gpus else "no GPU")
        if self.memory_bytes is not None:
            parts.append(f"{format_size(self.memory_bytes)} of memory")
        return ", ".join(parts)

    def to_record(self) -> dict[str, Any]:
        """The resources as JSON: CPUs in the kernel's notation, without NUMA nodes."""
        return {
            "cpus": format_cpus(self.cpus),
            "gpus": None if self.gpus is None else list(self.gpus),
            "memory_bytes": self.memory_bytes,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Place:
        """Read a record of :meth:`to_record`; a missing key means unknown."""
        gpus = record.get("gpus")
        return cls(
            cpus=tuple(parse_cpus(record.get("cpus", ""))),
            gpus=None if gpus is None else tuple(gpus),
            memory_bytes=record.get("memory_bytes"),
        )

    def environment(self, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Environment variables of these resources; the user's OMP_NUM_THREADS is kept."""
        found = {}
        if self.gpus is not None:
            found[CUDA] = ",".join(self.gpus)
        if self.cpus and "OMP_NUM_THREADS" not in environ:
            found["OMP_NUM_THREADS"] = str(len(self.cpus))
        if self.memory_bytes is not None:
            found[MEMORY] = str(self.memory_bytes)
        return found


def own_place(environ: Mapping[str, str] = os.environ) -> Place:
    """The resources of this process, whether hpctk, Slurm, Ray or nobody assigned them.

    ``gpus`` is None if CUDA_VISIBLE_DEVICES is not set.
    """
    gpus, limit = environ.get(CUDA), environ.get(MEMORY, "")
    return Place(
        cpus=tuple(sorted(os.sched_getaffinity(0))),
        gpus=None if gpus is None else tuple(gpu for gpu in gpus.split(",") if gpu),
        memory_bytes=int(limit) if limit.isdigit() else None,
    )


def place_workers(machine: Machine, shares: Shares, workers: int) -> list[Place]:
    """Assign resources to each worker; no CPU is assigned twice.

    A worker's CPUs come from one NUMA node if any node has enough left: the node of its GPU if
    possible, else the node with the most CPUs left. Raises ConfigError: the workers need more than
    this process may use of the machine.
    """
    _refuse_cpus(machine, shares, workers)
    _refuse_memory(machine, shares, workers)
    free = {node: list(cpus) for node, cpus in machine.nodes.items()}
    places = []
    for worker in range(workers):
        gpus = _gpus_of(machine, shares, worker, workers)
        near = [machine.gpu_nodes[gpu] for gpu in gpus or () if gpu in machine.gpu_nodes]
        cpus = shares.cpus or 0
        if shares.divided and machine.cpus >= workers:
            cpus = equal_part(machine.cpus, workers, worker)
        taken = _take(free, cpus, near)
        places.append(
            Place(
                cpus=tuple(cpu for _, cpu in taken),
                nodes=tuple(sorted({node for node, _ in taken})),
                gpus=gpus,
                memory_bytes=shares.memory_bytes,
            )
        )
    return places


def equal_part(total: int, workers: int, worker: int) -> int:
    """The number of CPUs or GPUs that one worker gets; the first gets the remainder as well."""
    each, rest = divmod(total, workers)
    return each if worker else each + rest


def _take(free: dict[int, list[int]], count: int, near: list[int]) -> list[tuple[int, int]]:
    """Remove ``count`` CPUs from ``free``; return them as (node, CPU)."""
    order = sorted(free, key=lambda node: (node not in near, -len(free[node]), node))
    whole = [node for node in order if len(free[node]) >= count]
    taken: list[tuple[int, int]] = []
    for node in whole[:1] or sorted(free, key=lambda node: (-len(free[node]), node)):
        while free[node] and len(taken) < count:
            taken.append((node, free[node].pop(0)))
    return taken


def _refuse_cpus(machine: Machine, shares: Shares, workers: int) -> None:
    if shares.cpus is None:
        return
    needed = workers * shares.cpus
    granted = min(machine.cpus, machine.cpu_quota or math.inf)
    if needed > granted:
        wanted = f"{counted(workers, 'worker')} x --cpus-per-worker {shares.cpus} = {needed} CPUs"
        message = f"{wanted}, but this process can use only {granted:g}"
        fit = int(granted // shares.cpus)
        hint = f"--workers {fit}" if fit else f"--cpus-per-worker {max(1, int(granted))}"
        raise ConfigError(message, hint=hint)


def _refuse_memory(machine: Machine, shares: Shares, workers: int) -> None:
    if shares.memory_bytes is None:
        return
    if workers * shares.memory_bytes > machine.memory_bytes:
        each, all_of_it = format_size(shares.memory_bytes), format_size(machine.memory_bytes)
        wanted = f"{counted(workers, 'worker')} x --memory-per-worker {each}"
        message = f"{wanted} exceed the available {all_of_it}"
        fit = machine.memory_bytes // shares.memory_bytes
        mib = machine.memory_bytes // workers // 2**20
        hint = f"--workers {fit}" if fit else f"--memory-per-worker {mib}M"
        raise ConfigError(message, hint=hint)


def _gpus_of(machine: Machine, shares: Shares, worker: int, workers: int) -> tuple[str, ...] | None:
    """The GPUs of one worker. Raises ConfigError: there are too few GPUs for all workers."""
    if shares.divided and machine.gpus:
        count = equal_part(len(machine.gpus), workers, worker)
        end = len(machine.gpus) - (workers - 1 - worker) * (len(machine.gpus) // workers)
        return machine.gpus[end - count : end]
    each = shares.gpus
    if each is None:
        return None
    if each == 0:
        return ()
    needed = -(-workers // shares.sharing) * max(1, int(each))
    if needed > len(machine.gpus):
        wanted = f"{counted(workers, 'worker')} x --gpus-per-worker {each:g}"
        seen = len(machine.gpus)
        message = f"{wanted} need {counted(needed, 'GPU')}, but this process sees {seen}"
        raise ConfigError(message, hint="start fewer workers, or let some share a GPU: 0.5")
    first = worker // shares.sharing * max(1, int(each))
    return machine.gpus[first : first + max(1, int(each))]


def bind(place: Place) -> None:
    """Bind this process to its CPUs; its children inherit the binding. Memory is not bound."""
    if place.cpus:
        os.sched_setaffinity(0, place.cpus)


def bind_rank(environ: Mapping[str, str] = os.environ) -> None:
    """Bind a rank to its part of the CPUs of its step on this node, if Slurm has not bound it."""
    ranks, rank = ranks_here(environ), rank_here(environ)
    cpus = [cpu for some in _nodes(Path("/"), os.sched_getaffinity(0)).values() for cpu in some]
    step_has = str(len(cpus)) == environ.get("SLURM_CPUS_ON_NODE")
    shared = step_has and "mask" not in environ.get("SLURM_CPU_BIND_TYPE", "")
    each = len(cpus) // ranks
    if rank.isdigit() and each and (shared or len(cpus) * ranks > (os.cpu_count() or 1)):
        os.sched_setaffinity(0, cpus[int(rank) * each : (int(rank) + 1) * each])


def limit_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Limit what this process, and each child separately, may allocate to the worker's share.

    RLIMIT_DATA (getrlimit(2)) counts private writable memory, touched or not. The address space is
    not limited, because CUDA reserves more than any machine has.
    """
    limit = environ.get(MEMORY, "")
    if limit.isdigit():
        import resource

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        soft = int(limit) if hard == resource.RLIM_INFINITY else min(int(limit), hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


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
    built_in = re.search(r"^MemTotal: +(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    built_in_bytes = int(built_in[1]) * 1024 if built_in else 2**63
    limits = [built_in_bytes, memory, _granted_bytes(environ, len(allowed))]
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


def _granted_bytes(environ: Mapping[str, str], cpus: int) -> int | None:
    """Memory that Slurm granted on this node; None for no limit, also where Slurm says 0."""
    node, cpu = (environ.get(f"SLURM_MEM_PER_{name}", "") for name in ("NODE", "CPU"))
    cpus = int(environ.get("SLURM_CPUS_ON_NODE") or cpus)  # this task may be bound to a few
    mib = int(node) if node.isdigit() else int(cpu) * cpus if cpu.isdigit() else 0
    return mib * 2**20 or None


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
