"""Compute the share of a Ray cluster's nodes for each worker, and how many workers fit."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.engines.ray.settings import RaySettings

_STEPS = 10_000
"""Ray counts resources in ten-thousandths."""


def share(amounts: list[float], workers: int) -> float:
    """Return the most that each of ``workers`` can have of a resource: 1, else a fraction of one.

    Args:
        amounts: amount of the resource on each node; a worker is on one node.
        workers: number of workers that share it.

    Returns:
        0 if no node has any.
    """
    whole = sum(math.floor(amount) for amount in amounts)
    if whole >= workers:
        return 1.0
    fractions = sorted(
        (min(1.0, amount / parts) for amount in amounts for parts in range(1, workers + 1)),
        reverse=True,
    )
    for fraction in fractions:
        rounded = math.floor(fraction * _STEPS) / _STEPS
        if sum(_parts(amount, rounded) for amount in amounts) >= workers:
            return rounded
    return 0.0


def room(nodes: list[dict[str, float]], demand: dict[str, float]) -> int:
    """Return how many workers with this demand fit on the nodes at once, each on one node.

    Args:
        nodes: the resources of each node by Ray's names.
        demand: the resources of a worker by Ray's names; 0 for those that it does not need.
    """
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    if not needed:
        return 1 << 30
    return sum(
        min(_parts(node.get(name, 0.0), amount) for name, amount in needed.items())
        for node in nodes
    )


def demand_of(
    settings: RaySettings, nodes: list[dict[str, float]], workers: int
) -> dict[str, float]:
    """Return the resources that Ray counts for each worker, by Ray's names."""
    cpus, gpus = settings.cpus_per_worker, settings.gpus_per_worker
    if cpus is None:
        cpus = share([node.get("CPU", 0.0) for node in nodes], workers)
    if gpus is None:
        gpus = share([node.get("GPU", 0.0) for node in nodes], workers)
    return {"CPU": cpus, "GPU": gpus, "memory": float(settings.memory_per_worker or 0)}


def check_room(nodes: list[dict[str, float]], demand: dict[str, float], workers: int) -> None:
    """Print a note if some workers must wait; refuse if none would ever start.

    Raises:
        ConfigError: no node has the resources that a worker needs.
    """
    fit = room(nodes, demand)
    if fit >= workers:
        return
    asked = ", ".join(f"{amount:g} {name}" for name, amount in demand.items() if amount)
    if fit == 0:
        message = f"no node of the Ray cluster has {asked} for a worker"
        raise ConfigError(
            message, hint="ask less for each worker; 'ray status' tells what there is"
        )
    sys.stderr.write(
        f"note: the Ray cluster has room for {fit} of {workers} workers ({asked} each); "
        "the others wait for more\n"
    )


def _parts(amount: float, part: float) -> int:
    return round(amount * _STEPS) // max(1, round(part * _STEPS))
