"""Decide which partition of a cluster takes a job, and explain why the others do not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.errors import RenderError
from hpc_toolkit.slurm.clusters.facts import Origin
from hpc_toolkit.slurm.clusters.keys import NODE_KEYS
from hpc_toolkit.system.quantities import counted, format_mem, format_walltime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.slurm.clusters.facts import Cluster, Partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The nodes, the resources per node and the time that a job requests."""

    nodes: int
    gpus_per_node: int
    cpus: int
    """CPUs of each node, at least."""
    mem_mib: int
    """Memory of each node in MiB, at least; 0 for all of it, or if the job does not say."""
    time_s: int
    gpu_type: str | None = None
    """The type that the GPUs must have; None for any."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Origins of the values that the user did not give, by the keys of their limits."""

    def __str__(self) -> str:
        kind = self.gpu_type or ("GPU" if self.gpus_per_node == 1 else "GPUs")
        gpus = f" with {self.gpus_per_node} {kind}" if self.gpus_per_node else ""
        return f"{counted(self.nodes, 'node')}{gpus} for {format_walltime(self.time_s)}"


class Excess(NamedTuple):
    """A limit that a job violates, by its key in a cluster file; the other two are values."""

    key: str
    wanted: str
    limit: str


class _Words(NamedTuple):
    asked: str
    """The option or quantity that violates the limit."""
    reason: str
    """Why a partition refuses; the limit's value follows."""
    relation: str
    """How the request differs from the limit; ``{}`` is the cluster's name."""
    way_out: str
    """What to request instead."""


_MORE = "more than {} has"
_WORDS = {
    "gpu_type": _Words("--gpu-type", "its GPUs are", "not what {} has", "another type of GPU"),
    "nodes": _Words("--nodes", "nodes at most", _MORE, "fewer nodes"),
    "min_nodes": _Words("--nodes", "nodes at least", "less than {} takes", "more nodes"),
    "gpus_per_node": _Words("--gpus-per-node", "GPUs a node at most", _MORE, "fewer GPUs a node"),
    "cpus_per_node": _Words(
        "--ntasks-per-node x --cpus-per-task", "CPUs a node at most", _MORE, "fewer CPUs a node"
    ),
    "mem_per_node": _Words("memory per node", "memory a node at most", _MORE, "less memory"),
    "max_walltime": _Words("--time", "time at most", _MORE, "less time"),
}


def exceeded(site: Cluster, needs: Needs) -> Iterator[Excess]:
    """Yield the limits that a job violates; ``site`` may be a partition from ``for_partition``.

    A limit that the site does not state is not checked.
    """
    if needs.gpus_per_node and needs.gpu_type and site.gpu_type not in (None, needs.gpu_type):
        yield Excess("gpu_type", needs.gpu_type, str(site.gpu_type))
    if needs.nodes < (site.min_nodes or 1):
        yield Excess("min_nodes", str(needs.nodes), str(site.min_nodes))
    for key, wanted, limit, shown in (
        ("nodes", needs.nodes, site.nodes, str),
        ("gpus_per_node", needs.gpus_per_node, site.gpus_per_node, str),
        ("cpus_per_node", needs.cpus, site.cpus_per_node, str),
        ("mem_per_node", needs.mem_mib, site.mem_per_node_mib, format_mem),
        ("max_walltime", needs.time_s, site.max_walltime_s, format_walltime),
    ):
        if limit is not None and wanted > limit:
            yield Excess(key, shown(wanted), shown(limit))


def choose_partition(cluster: Cluster, needs: Needs) -> str:
    """Return the first unrestricted partition, in the order of the file, that takes the job.

    If none does, raises RenderError with the reason of each partition.
    """
    free = [one.name for one in cluster.partitions if not one.restricted]
    if not free:
        msg = f"{cluster.written('partitions')}: all partitions are restricted, so none is chosen"
        raise RenderError(msg, hint="name yours with --partition")
    return _first_fitting(cluster, free, needs)[0]


def fitting_site(cluster: Cluster, names: tuple[str, ...], needs: Needs) -> Cluster:
    """Return the cluster with the limits of the first named partition that takes the job.

    ``()`` names all partitions. If a cluster lists partitions, its own limits bind no job, because
    a partition may allow more. Returns the cluster itself if it lists none, or, unchecked, if one
    of ``names`` is not listed. Raises RenderError if nothing takes the job: Slurm would accept a
    job beyond its partition's limits and leave it pending for ever.
    """
    known = [one.name for one in cluster.partitions]
    if known and not set(known) >= set(names):
        return cluster
    return _first_fitting(cluster, names if known and names else known, needs)[1]


def _first_fitting(cluster: Cluster, names: Sequence[str], needs: Needs) -> tuple[str, Cluster]:
    """Return the first of these partitions that takes the job, or the cluster for no names."""
    sites = {name: named_site(cluster, name) for name in names} or {"": cluster}
    for name, site in sites.items():
        if not any(exceeded(site, needs)):
            return name, site
    raise _refusal(cluster, sites, needs)


def named_site(cluster: Cluster, partition: str | None) -> Cluster:
    named = [one for one in cluster.partitions if one.name == partition]
    return for_partition(cluster, named[0]) if named else cluster


def for_partition(cluster: Cluster, partition: Partition) -> Cluster:
    """Return ``cluster`` with the limits and the nodes of one of its partitions.

    Values that the partition does not state stay. ``written`` shows the origin of each value.
    """
    origins = dict(cluster.origins)
    file = origins["partitions"].file if "partitions" in origins else cluster.file
    stated = {}
    for key, (name, _) in NODE_KEYS.items():
        if getattr(partition, name) is not None:
            stated[name] = getattr(partition, name)
            origins[key] = Origin(file=file, key=f"partitions.{partition.name}.{key}")
    return replace(cluster, origins=tuple(origins.items()), **stated)


def _refusal(cluster: Cluster, sites: dict[str, Cluster], needs: Needs) -> RenderError:
    """Build the error for a job that no partition takes, nor a cluster without partitions."""
    excesses = {name: list(exceeded(site, needs)) for name, site in sites.items()}
    first = next(iter(sites))
    for one in excesses[first]:
        if all(one in others for others in excesses.values()):
            return _beyond(sites[first], one, needs)
    source = {key: f" than {where} says" for key, where in needs.sources.items()}
    ways = {
        one.key: f"{_WORDS[one.key].way_out}{source.get(one.key, '')}"
        for found in excesses.values()
        for one in found
    }
    said = "; ".join(
        f"{name}: {_WORDS[found[0].key].reason} {found[0].limit}"
        for name, found in excesses.items()
    )
    msg = f"no partition of {cluster.name} offers {needs} ({cluster.written('partitions')}: {said})"
    hint = f"request {', or '.join(ways.values())}"
    if "max_walltime" in ways:
        hint += "; a job can requeue itself until its work is done"
    return RenderError(msg, hint=hint)


def _beyond(site: Cluster, one: Excess, needs: Needs) -> RenderError:
    """Build the error for a limit that the job violates in the same way in all partitions."""
    words = _WORDS[one.key]
    source = f" ({needs.sources[one.key]})" if one.key in needs.sources else ""
    relation = words.relation.format(site.name)
    msg = f"{words.asked}{source}: {one.wanted} is {relation}"
    msg += f" ({site.written(one.key)} = {one.limit})"
    hint = f"request {words.way_out}, or correct the cluster file"
    return RenderError(msg, hint=hint)
