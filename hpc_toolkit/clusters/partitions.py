"""Which partition of a cluster takes a job, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.clusters.merge import Origin
from hpc_toolkit.errors import RenderError
from hpc_toolkit.quantities import format_mem, format_walltime

if TYPE_CHECKING:
    from hpc_toolkit.clusters.facts import Cluster, Partition

_HINT = "ask for less time and let the job requeue itself, or for fewer nodes"

_NODE_FACTS = {
    "nodes": "nodes",
    "max_walltime": "max_walltime_s",
    "gpus_per_node": "gpus_per_node",
    "gpu_type": "gpu_type",
    "cpus_per_node": "cpus_per_node",
    "mem_per_node": "mem_per_node_mib",
}
"""Keys that a partition may state for itself, and their fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job asks of each of its nodes, and for how long."""

    nodes: int
    """Number of nodes."""
    gpus_per_node: int
    """GPUs of each node."""
    cpus: int | None
    """CPUs of each node; None where the job does not say."""
    mem_mib: int | None
    """Memory of each node in MiB; 0 for all of it, None where the job does not say."""
    time_s: int
    """Time limit in seconds."""
    gpu_type: str | None = None
    """The type of GPU that it must be; None for any."""

    def __str__(self) -> str:
        gpus = f" with {self.gpus_per_node} {self.gpu_type or 'GPUs'}" if self.gpus_per_node else ""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes}{gpus} for {format_walltime(self.time_s)}"


def choose_partition(
    cluster: Cluster,
    *,
    nodes: int,
    gpus_per_node: int,
    cpus: int | None,
    mem_mib: int | None,
    time_s: int,
    gpu_type: str | None = None,
) -> Partition:
    """The first partition, in the order of the cluster's file, that takes the job.

    The arguments are those of ``Needs``. Raises RenderError, with the reason of each, if none does.
    """
    needs = Needs(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        mem_mib=mem_mib,
        time_s=time_s,
        gpu_type=gpu_type,
    )
    return _first(cluster, cluster.partitions, needs)


def check_partitions(
    cluster: Cluster,
    names: tuple[str, ...],
    *,
    nodes: int,
    gpus_per_node: int,
    cpus: int | None,
    mem_mib: int | None,
    time_s: int,
    gpu_type: str | None = None,
) -> None:
    """Raise RenderError unless one of the named partitions, or of all for ``()``, takes the job.

    A job beyond its partition's limits is no error for Slurm: it stays pending for ever. Nothing
    is checked where no partition is known, or one of ``names`` is not.
    """
    known = {partition.name for partition in cluster.partitions}
    if not known or not known.issuperset(names):
        return
    needs = Needs(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        mem_mib=mem_mib,
        time_s=time_s,
        gpu_type=gpu_type,
    )
    _first(cluster, tuple(p for p in cluster.partitions if not names or p.name in names), needs)


def for_partition(cluster: Cluster, partition: Partition) -> Cluster:
    """``cluster`` with the limits and the nodes of one of its partitions.

    What the partition leaves open stays; ``written`` tells where each value is from.
    """
    stated = {
        key: (field, getattr(partition, field))
        for key, field in _NODE_FACTS.items()
        if getattr(partition, field) is not None
    }
    file = dict(cluster.origins).get("partitions", Origin(file=cluster.file, key="")).file
    origins = dict(cluster.origins)
    for key in stated:
        origins[key] = Origin(file=file, key=f"partitions.{partition.name}.{key}")
    return replace(cluster, origins=tuple(origins.items()), **dict(stated.values()))


def _first(cluster: Cluster, partitions: tuple[Partition, ...], needs: Needs) -> Partition:
    reasons = {}
    for partition in partitions:
        reasons[partition.name] = _refusal(for_partition(cluster, partition), needs)
        if not reasons[partition.name]:
            return partition
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    msg = f"no partition of {cluster.name} gives {needs} ({cluster.written('partitions')}: {said})"
    raise RenderError(msg, hint=_HINT)


def _refusal(site: Cluster, needs: Needs) -> str:
    """Why a partition, as the cluster that it is, does not take the job; "" if it does."""
    if needs.gpu_type and site.gpu_type not in (None, needs.gpu_type):
        return f"its GPUs are {site.gpu_type}"
    for what, wanted, limit, shown in (
        ("nodes", needs.nodes, site.nodes, str),
        ("GPUs a node", needs.gpus_per_node, site.gpus_per_node, str),
        ("CPUs a node", needs.cpus, site.cpus_per_node, str),
        ("memory a node", needs.mem_mib, site.mem_per_node_mib, format_mem),
        ("time", needs.time_s, site.max_walltime_s, format_walltime),
    ):
        if wanted is not None and limit is not None and wanted > limit:
            return f"{what} at most {shown(limit)}"
    return ""
