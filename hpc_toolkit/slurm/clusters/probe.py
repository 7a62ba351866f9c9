"""Read Slurm's configuration, partitions and nodes, and derive what each partition offers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import ask
from hpc_toolkit.slurm.clusters.keys import PARTITION_NAME
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.slurm.records import parse_records
from hpc_toolkit.system.quantities import counted, format_mem, parse_walltime

if TYPE_CHECKING:
    from collections.abc import Mapping

_ANSWER_S = 60.0
"""Seconds for an answer: ten thousand nodes are ten megabytes of text."""

_EVERYBODY = {
    "AllowAccounts": "ALL",
    "AllowGroups": "ALL",
    "AllowQos": "ALL",
    "AllocNodes": "ALL",
    "ReqResv": "NO",
    "DenyAccounts": "",
    "DenyQos": "",
}
"""Settings of a partition that all users may use, from any host and without a reservation."""


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The answers of ``scontrol show``, as text."""

    config: dict[str, str]
    partitions: tuple[dict[str, str], ...]
    nodes: tuple[dict[str, str], ...]


def ask_slurm() -> SlurmFacts:
    """Ask the controller for its configuration, partitions and nodes.

    Reads the plain output, because JSON output needs a later version of Slurm and a plugin.

    Raises SlurmError: Slurm is not installed here, or does not answer.
    """
    show = ["scontrol", "--oneliner", "show"]
    return SlurmFacts(
        config=slurm_config(timeout_s=_ANSWER_S),
        partitions=parse_records(ask([*show, "partition"], timeout_s=_ANSWER_S)),
        nodes=parse_records(ask([*show, "node"], timeout_s=_ANSWER_S)),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The resources that a job can get on one node."""

    gpus: int
    """GPUs of the type that is most frequent on the node."""
    gpu_type: str | None
    """That type; None if Slurm names none."""
    cpus: int | None
    """CPUs without those reserved for the system; None if unknown."""
    mem_mib: int | None
    """Memory in MiB without that reserved for the system; None if unknown."""

    def __str__(self) -> str:
        gpus = [f"{counted(self.gpus, 'GPU')} {self.gpu_type or ''}".rstrip()] if self.gpus else []
        cpus = [counted(self.cpus, "CPU")] if self.cpus else []
        return ", ".join([*gpus, *cpus, *([format_mem(self.mem_mib)] if self.mem_mib else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One partition and its most frequent node shape; if it has GPUs, the shape of a GPU node."""

    name: str
    default: bool
    """Whether jobs without a partition go there."""
    max_walltime_s: int | None
    nodes: int
    """Number of nodes with at least ``shape``, and at most the partition's MaxNodes."""
    min_nodes: int | None
    shape: Shape
    """That shape within the partition's limits; without a GPU type if the nodes have several."""
    remarks: tuple[str, ...]
    """Remarks for the reader of the file: other nodes, who may use it, preemption."""
    restricted: bool


def offers(facts: SlurmFacts) -> tuple[list[Offer], list[str]]:
    """Return the partitions that take jobs, and why the others do not.

    The default partition comes first, restricted ones last. Partitions that have no nodes, are not
    up, or are only for root are left out.
    """
    found, left_out = [], []
    for record in facts.partitions:
        name = record.get("PartitionName", "")
        why = _unusable(record)
        shapes = Counter(
            _shape(n) for n in facts.nodes if name in n.get("Partitions", "").split(",")
        )
        if not why and not shapes:
            why = "no nodes"
        if why:
            left_out.append(f"{name!r}: {why}")
        else:
            found.append(_offer(record, shapes, facts.config))
    # The sort is stable, so that other partitions keep Slurm's order.
    return sorted(found, key=lambda one: (not one.default, one.restricted)), left_out


def gpus_of(gres: str) -> tuple[int, str | None]:
    """Return number and type of the GPUs in a node's ``Gres``; the most frequent type counts.

    ``gpu:l40s:4(S:0-1),nvme:1`` gives 4 and ``l40s``.
    """
    found: Counter[str] = Counter()
    for entry in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *words = entry.split(":")
        if kind == "gpu":
            count = words.pop() if words and words[-1].isdecimal() else "1"
            types = [word for word in words if word != "no_consume"]
            found[types[0] if types else ""] += int(count)
    if not found:
        return 0, None
    ((name, number),) = found.most_common(1)
    return number, name or None


def _offer(record: Mapping[str, str], shapes: Counter[Shape], config: Mapping[str, str]) -> Offer:
    with_gpus = Counter({shape: n for shape, n in shapes.items() if shape.gpus})
    ((shape, _),) = (with_gpus or shapes).most_common(1)
    count = sum(n for one, n in shapes.items() if _gives(one, shape))
    several = len({one.gpu_type for one in with_gpus}) > 1
    remarks = [f"other nodes: {n} x {one}" for one, n in shapes.most_common() if one != shape]
    limits = _limits(record)
    remarks += limits
    preempted = record.get("PreemptMode", "OFF")
    if preempted != "OFF":
        remarks.append(f"PreemptMode={preempted}: jobs here may have to give way to others")
    cpus = _number(record, "MaxCPUsPerNode")
    # A partition's own limit overrides that of the cluster.
    mem = _number(record, "MaxMemPerNode") or _number(config, "MaxMemPerNode")
    least = _number(record, "MinNodes") or 1
    return Offer(
        name=record["PartitionName"],
        default=record.get("Default") == "YES",
        max_walltime_s=_walltime(record.get("MaxTime", "UNLIMITED")),
        nodes=_least(count, _number(record, "MaxNodes")) or count,
        min_nodes=least if least > 1 else None,
        shape=Shape(
            shape.gpus,
            None if several else shape.gpu_type,
            _least(shape.cpus, cpus),
            _least(shape.mem_mib, mem),
        ),
        remarks=tuple(remarks),
        restricted=bool(limits),
    )


def _limits(record: Mapping[str, str]) -> list[str]:
    return [
        f"restricted: {key}={record[key]}"
        for key, everybody in _EVERYBODY.items()
        if record.get(key, everybody) != everybody
    ]


def _gives(one: Shape, wanted: Shape) -> bool:
    """Return whether a shape has at least the resources of another one, of any GPU type."""
    have, need = ((s.gpus, s.cpus or 0, s.mem_mib or 0) for s in (one, wanted))
    return all(a >= b for a, b in zip(have, need, strict=True))


def _unusable(record: Mapping[str, str]) -> str:
    name, state = record.get("PartitionName", ""), record.get("State", "UP")
    if not re.fullmatch(PARTITION_NAME, name):
        return "a name with characters that no script takes"
    if state != "UP":
        return f"State={state}"
    return "RootOnly=YES" if record.get("RootOnly") == "YES" else ""


def _shape(node: Mapping[str, str]) -> Shape:
    gpus, gpu_type = gpus_of(node.get("Gres", ""))
    # Since 22.05, CPUEfctv is the number of CPUs that CoreSpecCount leaves to jobs.
    cpus = _number(node, "CPUEfctv") or _number(node, "CPUTot")
    mem = _number(node, "RealMemory")
    kept = _number(node, "MemSpecLimit") or 0
    # Slurm shows RealMemory=1 if it is not configured.
    known = mem is not None and mem > max(1, kept)
    return Shape(gpus, gpu_type, cpus, mem - kept if mem and known else None)


def _number(record: Mapping[str, str], key: str) -> int | None:
    """Return a positive number; None for words such as UNLIMITED."""
    text = record.get(key, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _least(*numbers: int | None) -> int | None:
    return min(filter(None, numbers), default=None)


def _walltime(text: str) -> int | None:
    try:
        return parse_walltime(text)
    except ConfigError:
        return None
