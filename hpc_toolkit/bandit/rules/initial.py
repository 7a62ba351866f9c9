"""Choose the first arms of a search, before any score is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.history import first_best

if TYPE_CHECKING:
    from numpy.typing import NDArray


def space_filling_order(points: NDArray[np.float64], seed: int, n: int) -> list[int]:
    """Return the indices of ``n`` points, each as far as possible from all before it.

    Greedy maximin design, known as farthest-point traversal (Gonzalez 1985, "Clustering to
    minimize the maximum intercluster distance"). The seed draws the first point; equal distances
    go to the lowest index. ``points`` has shape (n_points, n_columns). A larger ``n`` gives a
    longer list with the same beginning, up to all points.
    """
    count = min(n, len(points))
    if count == 0:
        return []
    order = [int(np.random.default_rng([seed, Stream.FIRST_ARM]).integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(order) < count:
        newest = order[-1]
        nearest = np.minimum(nearest, ((points - points[newest]) ** 2).sum(axis=1))
        # Below every distance, even the distance 0 of a point with equal features.
        nearest[order] = -1.0
        order.append(first_best(nearest))
    return order
