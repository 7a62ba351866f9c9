"""The nodes of a plan: workers per node, price per hour, and power."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import format_mem

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What the user states about one worker."""

    cores: int | None = None
    """CPUs that it keeps busy; by default 1 on nodes without GPUs, and not a limit on others."""
    mem_mib: int | None = None
    """Its peak memory in MiB; None: not known."""
    per_node: int | None = None
    """Workers to start on a node, even if it has fewer GPUs; by default as many as fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node as a job gets it. None means unknown."""

    gpus: int
    cpus: int | None
    mem_mib: int | None
    workers: int
    """Number of workers that are started on the node."""
    why: str
    """What limits the number of workers."""
    price_per_hour: float | None
    """Price of the node with its GPUs."""
    watts: float | None
    """Power of the node with its GPUs."""
    currency: str


def node_of(
    site: Cluster,
    worker: Worker,
    *,
    gpus: int | None = None,
    price_per_gpu_hour: float | None = None,
    watts_per_gpu: float | None = None,
) -> Node:
    """Return a node of a cluster, or of a partition given as a cluster of its own.

    Args:
        site: the cluster or partition.
        worker: the needs of one worker.
        gpus: GPUs to use on each node; by default all.
        price_per_gpu_hour: replaces the site's prices.
        watts_per_gpu: replaces the site's value.

    Raises:
        ConfigError: more is requested than a node has, or not one worker fits.
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
    """Add up the values of a node and its GPUs; None if nothing is known."""
    if node is None and (gpu is None or not gpus):
        return None
    return (node or 0.0) + (gpu or 0.0) * gpus


def _workers(site: Cluster, worker: Worker, gpus: int) -> tuple[int, str]:
    """Return how many workers run on a node, and what limits them."""
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
