"""Forecast time and cost for each number of nodes, and time on each partition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.planning.work import SURE
from hpc_toolkit.slurm.clusters.partitions import for_partition
from hpc_toolkit.system.quantities import HOUR_S, MINUTE_S, counted, format_mem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.forecast import Forecast, Forecaster, Interval
    from hpc_toolkit.slurm.clusters.facts import Cluster


_MARGIN = 1.1
"""Factor from the time that is enough in 19 of 20 cases to the walltime to request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
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
    why: str
    price_per_hour: float | None
    """Price of the node with its GPUs; ``watts`` likewise."""
    watts: float | None
    currency: str


def node_of(
    site: Cluster,
    worker: Worker,
    *,
    gpus: int | None = None,
    price_per_gpu_hour: float | None = None,
) -> Node:
    """Return a node of a cluster, or of a partition given as a cluster of its own.

    ``gpus`` are those to use on each node, by default all. A given price replaces the site's.
    Raises ConfigError if a node has less than is requested, or not one worker fits.
    """
    most = site.gpus_per_node
    if gpus is not None and most is not None and gpus > most:
        message = f"--gpus-per-node: {gpus} is more than {site.name} has"
        raise ConfigError(message, hint=f"{site.written('gpus_per_node')} = {most}")
    count = gpus if gpus is not None else most or 0
    if price_per_gpu_hour is not None:
        if not count:
            message = f"--price-per-gpu-hour: no GPUs are known on the nodes of {site.name}"
            raise ConfigError(message, hint="add --gpus-per-node, or leave it out")
        site = replace(site, price_per_gpu_hour=price_per_gpu_hour, price_per_node_hour=None)
    workers, why = _workers(site, worker, count)
    return Node(
        gpus=count,
        cpus=site.cpus_per_node,
        mem_mib=site.mem_per_node_mib,
        workers=workers,
        why=why,
        price_per_hour=price_of(site, count),
        watts=_sum(site.watts_per_node, site.watts_per_gpu, count),
        currency=site.currency,
    )


def price_of(site: Cluster, gpus: int) -> float | None:
    """Return the price of a node with this many GPUs for one hour; None: not known."""
    return _sum(site.price_per_node_hour, site.price_per_gpu_hour, gpus)


def _sum(node: float | None, gpu: float | None, gpus: int) -> float | None:
    if node is None and (gpu is None or not gpus):
        return None
    return (node or 0.0) + (gpu or 0.0) * gpus


def _workers(site: Cluster, worker: Worker, gpus: int) -> tuple[int, str]:
    bounds: list[tuple[int, str]] = []
    cpus, mem_mib = site.cpus_per_node, site.mem_per_node_mib
    if gpus:
        bounds.append((gpus, f"one for each of {counted(gpus, 'GPU')}"))
    if cpus is not None and (worker.cores is not None or not gpus):
        cores = worker.cores or 1
        bounds.append((cpus // cores, f"{cores} of {counted(cpus, 'CPU')} each"))
    if mem_mib is not None and worker.mem_mib is not None:
        text = f"{format_mem(worker.mem_mib)} of {format_mem(mem_mib)} each"
        bounds.append((mem_mib // worker.mem_mib, text))
    fit = min(bounds, default=None)
    if worker.per_node is not None:
        if fit is not None and worker.per_node > fit[0] and not fit[1].startswith("one for"):
            message = f"--workers-per-node: {worker.per_node} do not fit on a node of {site.name}"
            raise ConfigError(message, hint=f"{fit[0]} do: {fit[1]}")
        return worker.per_node, "as requested"
    if fit is None:
        return 1, "nothing is known of the node; see --workers-per-node"
    if fit[0] < 1:
        message = f"not one worker fits on a node of {site.name}: {fit[1]}"
        hint = "reduce the resources per worker, or choose another cluster with --cluster"
        raise ConfigError(message, hint=hint)
    return fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One number of nodes with its forecast and its costs."""

    nodes: int
    forecast: Forecast
    node_hours: Interval
    gpu_hours: Interval | None
    cost: Interval | None
    energy_kwh: Interval | None
    ask_s: int
    """The time limit to request in seconds: enough in 19 of 20 cases, or the limit of one job."""
    in_a_row: int
    """Jobs in a row that finish the work in 19 of 20 cases: 1, or more if a limit cuts it; 0: the
    limit leaves no room for an item."""


def choose(
    forecaster: Forecaster,
    node: Node,
    nodes: int,
    *,
    limit_s: int | None = None,
    within_s: float | None = None,
) -> Choice:
    """Forecast the work on a number of nodes that begin now.

    If the time limit of one job is too short, several jobs follow each other.
    """
    forecast, ask_s, in_a_row = _in_jobs(forecaster, nodes * node.workers, limit_s, within_s)
    hours = forecast.time_s.times(nodes / HOUR_S)
    price, watts = node.price_per_hour, node.watts
    return Choice(
        nodes=nodes,
        forecast=forecast,
        node_hours=hours,
        gpu_hours=hours.times(node.gpus) if node.gpus else None,
        cost=None if price is None else hours.times(price),
        energy_kwh=None if watts is None else hours.times(watts / 1000.0),
        ask_s=ask_s,
        in_a_row=in_a_row,
    )


def _in_jobs(
    forecaster: Forecaster, workers: int, limit_s: int | None, within_s: float | None = None
) -> tuple[Forecast, int, int]:
    """Forecast under the time limit of one job: with the limit to request, and the jobs in a row.

    The number of jobs is enough in 19 of 20 cases; it is 0 if no number is.
    """
    from hpc_toolkit.planning.forecast import START_S  # numpy is slow to import

    forecast = forecaster.forecast(workers, within_s=within_s)
    ask_s = _round_up(forecast.sure_s * _MARGIN + START_S)
    if limit_s is None or ask_s <= limit_s:
        return forecast, ask_s, 1
    forecast = forecaster.forecast(workers, limit_s=limit_s, within_s=within_s)
    return forecast, limit_s, forecast.sure_jobs


def _round_up(seconds: float) -> int:
    """Round up to 5 minutes up to 2 hours, to 15 minutes up to a day, and to hours beyond."""
    step = 5 * MINUTE_S if seconds <= 2 * HOUR_S else 15 * MINUTE_S
    step = HOUR_S if seconds > 24 * HOUR_S else step
    return math.ceil(seconds / step) * step


def recommended(choices: Sequence[Choice]) -> Choice | None:
    """Return the choice with the fewest node-hours that is done in time in 19 of 20 cases; None
    without such a choice, or if no time was given.
    """
    able = [one for one in choices if one.in_a_row and (one.forecast.within or 0.0) >= SURE]
    return min(able, key=lambda one: (one.node_hours.median, one.nodes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one partition would run the work: as one job, or as several short jobs in a row."""

    partition: str
    limit_s: int | None
    most_nodes: int | None
    nodes: int
    """Nodes that the jobs use: the requested number, or the most that the partition allows."""
    in_a_row: int
    """Number of jobs in a row; 0: the longest item does not fit."""
    jobs: int
    """Total number of jobs of one node each, as in a job array."""
    time_s: Interval
    """Seconds of work, restarts included, but without waiting for Slurm."""
    lost_node_hours: float
    """Mean node-hours of this time that are lost at the ends of jobs."""


def ways(forecaster: Forecaster, cluster: Cluster, node: Node, nodes: int) -> list[Way]:
    """Return how each unrestricted partition would run the work, with up to ``nodes`` nodes."""
    found = []
    for partition in cluster.partitions:
        site = for_partition(cluster, partition)
        fewer = (site.gpus_per_node or node.gpus) < node.gpus
        if partition.restricted or fewer or nodes < (site.min_nodes or 1):
            continue
        count = min(nodes, site.nodes or nodes)
        forecast, _, row = _in_jobs(forecaster, count * node.workers, site.max_walltime_s)
        found.append(
            Way(
                partition=partition.name,
                limit_s=site.max_walltime_s,
                most_nodes=site.nodes,
                nodes=count,
                in_a_row=row,
                jobs=row * count,
                time_s=forecast.time_s,
                lost_node_hours=forecast.lost_s * count / HOUR_S,
            )
        )
    return found
