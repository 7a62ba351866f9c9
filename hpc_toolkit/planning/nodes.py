"""The nodes of a plan: how many workers one holds, what an hour of it costs, and its power."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import format_mem

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What a person says of one worker."""

    cores: int | None = None
    """CPUs that it keeps busy; by default its share."""
    mem_mib: int | None = None
    """Memory that it needs at its peak; None where unknown."""
    per_node: int | None = None
    """How many to start on a node, whatever fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as a job gets it. None means unknown."""

    gpus: int
    cpus: int | None
    mem_mib: int | None
    workers: int
    """Workers that are started on it."""
    why: str
    """What bounds their number."""
    price_per_hour: float | None
    """Of the node with its GPUs."""
    watts: float | None
    """Of the node with its GPUs."""
    currency: str


def node_of(
    site: Cluster,
    worker: Worker,
    *,
    gpus: int | None = None,
    price_per_gpu_hour: float | None = None,
    watts_per_gpu: float | None = None,
) -> Node:
    """A node of a cluster, or of a partition as the cluster that it is.

    Args:
        site: whose facts count.
        worker: what one needs.
        gpus: of each node; by default all that it has.
        price_per_gpu_hour: in the place of the site's prices.
        watts_per_gpu: in the place of the site's.

    Raises:
        ConfigError: more than a node has is asked for, or not one worker fits.
    """
    most = site.gpus_per_node
    if gpus is not None and most is not None and gpus > most:
        message = f"--gpus-per-node: {gpus} is more than {site.name} has"
        raise ConfigError(message, hint=f"{site.written('gpus_per_node')} = {most}")
    count = gpus if gpus is not None else most or 0
    of_gpus = {"--price-per-gpu-hour": price_per_gpu_hour, "--watts-per-gpu": watts_per_gpu}
    for option, number in of_gpus.items():
        if number is not None and not count:
            message = f"{option}: the nodes of {site.name} have no GPUs, as far as is known"
            raise ConfigError(message, hint="add --gpus-per-node, or leave it out")
    if price_per_gpu_hour is not None:
        site = replace(site, price_per_gpu_hour=price_per_gpu_hour, price_per_node_hour=None)
    if watts_per_gpu is not None:
        site = replace(site, watts_per_gpu=watts_per_gpu)
    workers, why = _workers(site, worker, count)
    return Node(
        gpus=count,
        cpus=site.cpus_per_node,
        mem_mib=site.mem_per_node_mib,
        workers=workers,
        why=why,
        price_per_hour=_sum(site.price_per_node_hour, site.price_per_gpu_hour, count),
        watts=_sum(site.watts_per_node, site.watts_per_gpu, count),
        currency=site.currency,
    )


def _sum(node: float | None, gpu: float | None, gpus: int) -> float | None:
    """Of a node and its GPUs; None where nothing is known of what it has."""
    if node is None and (gpu is None or not gpus):
        return None
    return (node or 0.0) + (gpu or 0.0) * gpus


def _workers(site: Cluster, worker: Worker, gpus: int) -> tuple[int, str]:
    """How many fit, and what bounds them."""
    bounds: list[tuple[int, str]] = []
    cpus, mem_mib = site.cpus_per_node, site.mem_per_node_mib
    if gpus:
        bounds.append((gpus, f"one for each of {gpus} GPUs"))
    if cpus is not None and (worker.cores is not None or not gpus):
        cores = worker.cores or 1
        bounds.append((cpus // cores, f"{cores} of {cpus} CPUs each"))
    if mem_mib is not None and worker.mem_mib is not None:
        text = f"{format_mem(worker.mem_mib)} of {format_mem(mem_mib)} each"
        bounds.append((mem_mib // worker.mem_mib, text))
    fit = min(bounds, default=None)
    if worker.per_node is not None:
        if fit is not None and worker.per_node > fit[0] and not fit[1].startswith("one for"):
            message = f"--workers-per-node: {worker.per_node} do not fit on a node of {site.name}"
            raise ConfigError(message, hint=f"{fit[0]} do: {fit[1]}")
        return worker.per_node, "as asked for"
    if fit is None:
        return 1, "nothing is known of the node; see --workers-per-node"
    if fit[0] < 1:
        message = f"not one worker fits on a node of {site.name}: {fit[1]}"
        raise ConfigError(message, hint="ask for less, or name another cluster with --cluster")
    return fit
