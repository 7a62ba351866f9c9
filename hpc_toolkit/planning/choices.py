"""Forecast time and cost for each number of nodes, and time on each partition."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.planning.forecast import START_S
from hpc_toolkit.slurm.clusters.partitions import for_partition
from hpc_toolkit.system.quantities import HOUR_S, MINUTE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.forecast import Forecast, Forecaster, Interval
    from hpc_toolkit.planning.nodes import Node
    from hpc_toolkit.slurm.clusters.facts import Cluster

_MARGIN = 1.1
"""Factor from the upper end of the interval to the walltime to request."""
_SURE = 0.95
"""Probability of being done in time that a recommendation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One number of nodes with its forecast and its costs."""

    nodes: int
    forecast: Forecast
    node_hours: Interval
    gpu_hours: Interval | None
    """None without GPUs."""
    cost: Interval | None
    """None without a price."""
    energy_kwh: Interval | None
    """None without a known power."""
    ask_s: int
    """The time limit to request in seconds: enough in 19 of 20 cases, or the limit of one job."""
    in_a_row: int
    """Jobs in a row that finish the work in 19 of 20 cases: 1, or more if a limit cuts it; 0: the
    limit leaves no room for an item."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def choose(
    forecaster: Forecaster,
    node: Node,
    nodes: int,
    *,
    limit_s: int | None = None,
    within_s: float | None = None,
) -> Choice:
    """Forecast the work on a number of nodes that begin now.

    Args:
        forecaster: the forecaster of the run.
        node: one of the nodes.
        nodes: the number of nodes.
        limit_s: time limit of one job; if it is too short, several jobs follow each other.
        within_s: seconds within which the work should be done.
    """
    forecast = forecaster.forecast(nodes * node.workers, within_s=within_s)
    ask_s = _round_up(_asked_s(forecast))
    in_a_row = 1
    if limit_s is not None and ask_s > limit_s:
        ask_s = limit_s
        workers = nodes * node.workers
        forecast = forecaster.forecast(workers, within_s=within_s, limit_s=limit_s)
        in_a_row = _most_jobs(forecast)
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


def _round_up(seconds: float) -> int:
    """Round up to 5 minutes up to 2 hours, to 15 minutes up to a day, and to hours beyond."""
    step = 5 * MINUTE_S if seconds <= 2 * HOUR_S else 15 * MINUTE_S
    step = HOUR_S if seconds > 24 * HOUR_S else step
    return math.ceil(seconds / step) * step


def _asked_s(forecast: Forecast) -> float:
    return forecast.time_s.high * _MARGIN + START_S


def _most_jobs(forecast: Forecast) -> int:
    """Return how many jobs in a row are enough in 19 of 20 cases; 0 if no number is."""
    return 0 if forecast.jobs is None else math.ceil(forecast.jobs.high)


def recommended(choices: Sequence[Choice]) -> Choice | None:
    """Return the choice with the fewest node-hours that is done in time in 19 of 20 cases; None
    without such a choice, or if no time was given.
    """
    able = [one for one in choices if one.in_a_row and (one.forecast.within or 0.0) >= _SURE]
    return min(able, key=lambda one: (one.node_hours.median, one.nodes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one partition would run the work: as one job, or as several short jobs in a row."""

    partition: str
    limit_s: int | None
    """Time limit of a job in the partition, in seconds; None without a known limit."""
    most_nodes: int | None
    """Most nodes of a job in the partition; None: not known."""
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

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def ways(forecaster: Forecaster, cluster: Cluster, node: Node, nodes: int) -> list[Way]:
    """Return how each unrestricted partition would run the work, with up to ``nodes`` nodes."""
    found = []
    for partition in cluster.partitions:
        site = for_partition(cluster, partition)
        fewer = (site.gpus_per_node or node.gpus) < node.gpus
        if partition.restricted or fewer or nodes < (site.min_nodes or 1):
            continue
        count = min(nodes, site.nodes or nodes)
        workers = count * node.workers
        forecast = forecaster.forecast(workers, simulated=False)
        limit_s = site.max_walltime_s
        row = 1
        if limit_s is not None and _asked_s(forecast) > limit_s:
            forecast = forecaster.forecast(workers, limit_s=limit_s, simulated=False)
            row = _most_jobs(forecast)
        found.append(
            Way(
                partition=partition.name,
                limit_s=limit_s,
                most_nodes=site.nodes,
                nodes=count,
                in_a_row=row,
                jobs=row * count,
                time_s=forecast.time_s,
                lost_node_hours=forecast.lost_s * count / HOUR_S,
            )
        )
    return found
