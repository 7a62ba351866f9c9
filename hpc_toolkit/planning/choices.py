"""A forecast for each number of nodes with what it costs, and which partitions take it."""

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
"""Of a walltime beyond the upper end of the interval."""
_SURE = 0.95
"""How probably all is done in time, to be recommended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One number of nodes."""

    nodes: int
    forecast: Forecast
    node_hours: Interval
    gpu_hours: Interval | None
    """None without GPUs."""
    cost: Interval | None
    """None without a price."""
    energy_kwh: Interval | None
    """None without a power."""
    ask_s: int
    """The time limit to ask for: enough in 19 of 20 cases, unless a limit cuts it."""
    in_a_row: int
    """Jobs one after another that take it to its end in 19 of 20 cases, where a limit cuts them; 0:
    it leaves no room for an item."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def choose(
    forecaster: Forecaster,
    node: Node,
    nodes: int,
    *,
    limit_s: int | None = None,
    within_s: float | None = None,
) -> Choice:
    """The forecast for so many nodes that begin now.

    Args:
        forecaster: of the run.
        node: one of them.
        nodes: how many.
        limit_s: of one job; several follow each other where it is too short.
        within_s: by when something is wanted.
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
    """To 5 minutes below 2 hours, to 15 below a day, to hours beyond."""
    step = 5 * MINUTE_S if seconds <= 2 * HOUR_S else 15 * MINUTE_S
    step = HOUR_S if seconds > 24 * HOUR_S else step
    return math.ceil(seconds / step) * step


def _asked_s(forecast: Forecast) -> float:
    return forecast.time_s.high * _MARGIN + START_S


def _most_jobs(forecast: Forecast) -> int:
    """Jobs in a row that are enough in 19 of 20 cases; 0 if none ever would."""
    return 0 if forecast.jobs is None else math.ceil(forecast.jobs.high)


def recommended(choices: Sequence[Choice]) -> Choice | None:
    """The one of fewest node-hours that is done in time in 19 of 20 cases; None if none is, or no
    time was named."""
    able = [one for one in choices if one.in_a_row and (one.forecast.within or 0.0) >= _SURE]
    return min(able, key=lambda one: (one.node_hours.median, one.nodes), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How one partition would take the work: one job, or short ones after another."""

    partition: str
    limit_s: int | None
    """Longest job there; None without a known limit."""
    most_nodes: int | None
    """Most nodes of a job there, as far as is known."""
    nodes: int
    """Taken: as many as were asked for, if it gives them."""
    in_a_row: int
    """Jobs one after another; 0: the longest item does not fit."""
    jobs: int
    """One-node jobs in all, as an array would have them."""
    time_s: Interval
    """Of work, restarts included; waiting for Slurm is not."""
    lost_node_hours: float
    """Of that, what the ends of jobs cost, on average."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def ways(forecaster: Forecaster, cluster: Cluster, node: Node, nodes: int) -> list[Way]:
    """What each partition that is open to all makes of it, with as many nodes as it gives."""
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
