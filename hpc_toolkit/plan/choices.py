"""A forecast for each number of nodes with what it costs, and which partitions take it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.clusters.partitions import for_partition
from hpc_toolkit.quantities import HOUR_S, MINUTE_S

if TYPE_CHECKING:
    from hpc_toolkit.clusters.facts import Cluster
    from hpc_toolkit.plan.forecast import Forecast, Forecaster, Interval
    from hpc_toolkit.plan.nodes import Node

_MARGIN = 1.1
"""Of a walltime beyond the upper end of the interval."""
_START_S = 120.0
"""Until the ranks of a job work: its prologue, imports, the first claims."""


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
    """Jobs one after another that take it to its end, where a limit cuts them."""

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
    hours = forecast.time_s.times(nodes / HOUR_S)
    ask_s = _round_up(forecast.time_s.high * _MARGIN + _START_S)
    in_a_row = 1
    if limit_s is not None and ask_s > limit_s:
        ask_s = limit_s
        in_a_row = jobs_in_a_row(forecaster, forecast.time_s.high, limit_s)
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


def lost_s(forecaster: Forecaster) -> float:
    """What a worker loses, on average, to one end of its job: what it began in vain, the start, and
    loading again."""
    return forecaster.cut_s + _START_S + forecaster.load_s


def jobs_in_a_row(forecaster: Forecaster, time_s: float, limit_s: float) -> int:
    """Jobs one after another that do what takes one job so long; 0 if none ever would."""
    useful = limit_s - lost_s(forecaster)
    if useful <= 0 or forecaster.longest_s > limit_s:
        return 0
    return max(1, math.ceil(time_s / useful))


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
        time_s = forecaster.forecast(count * node.workers, simulated=False).time_s
        limit_s = site.max_walltime_s
        row = 1
        if limit_s is not None and time_s.high * _MARGIN + _START_S > limit_s:
            row = jobs_in_a_row(forecaster, time_s.high, limit_s)
        more_s = max(0, row - 1) * lost_s(forecaster)
        found.append(
            Way(
                partition=partition.name,
                limit_s=limit_s,
                most_nodes=site.nodes,
                nodes=count,
                in_a_row=row,
                jobs=row * count,
                time_s=time_s.plus(more_s),
                lost_node_hours=more_s * count / HOUR_S,
            )
        )
    return found
