"""What each worker gets of the nodes of a Ray cluster, and how many find room."""

from __future__ import annotations

import math

_STEPS = 10_000
"""Ray counts resources in ten-thousandths."""


def share(amounts: list[float], workers: int) -> float:
    """The most that each of ``workers`` can have of a resource: 1, else a fraction of one.

    Args:
        amounts: what every node has of it; a worker is on one node.
        workers: how many share it.

    Returns:
        0 where no node has any.
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
        if rounded and sum(_parts(amount, rounded) for amount in amounts) >= workers:
            return rounded
    return 0.0


def room(nodes: list[dict[str, float]], demand: dict[str, float]) -> int:
    """How many workers with this demand fit on the nodes at once; each is on one node.

    Args:
        nodes: the resources of each node by Ray's names.
        demand: those of a worker; what is 0 needs nothing.
    """
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    if not needed:
        return 1 << 30
    return sum(
        min(_parts(node.get(name, 0.0), amount) for name, amount in needed.items())
        for node in nodes
    )


def _parts(amount: float, part: float) -> int:
    return round(amount * _STEPS) // max(1, round(part * _STEPS))
