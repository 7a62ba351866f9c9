"""Statistics over many replayed searches: medians, rates, mean curves, and their bands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

RESAMPLES = 2_000
"""Number of bootstrap resamples of a band."""

COVERAGE = 0.95
"""Nominal coverage of a band."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How a cost varies between searches. Infinity means that a search did not reach the goal."""

    median: float
    """Half of the searches need no more."""

    p90: float
    """Nine of ten searches need no more: the lowest number with that property."""

    low: float
    """Lower end of the median's bootstrap band."""

    high: float
    """Upper end of the median's bootstrap band."""

    reached: float
    """The share of the searches that reached the goal, 0 to 1."""


def spread(values: Sequence[float], clusters: Sequence[int], *, seed: int = 0) -> Spread:
    """Return median, ninth decile and the median's bootstrap band of one number per search.

    Infinity means that a search did not reach the goal, and sorts above every number. For
    ``clusters`` see :func:`draws`. The band is of the lower median, which is one of the numbers.
    """
    numbers = np.asarray(values, dtype=np.float64)
    member, counts = draws(clusters, seed=seed)
    order = np.argsort(numbers, kind="stable")
    below = np.cumsum(counts[:, member[order]], axis=1)
    medians = numbers[order][np.argmax(2 * below >= below[:, -1:], axis=1)]
    low, high = _ends(medians[:, None])
    return Spread(
        median=_median(numbers),
        p90=float(np.quantile(numbers, 0.9, method="inverted_cdf")),
        low=float(low[0]),
        high=float(high[0]),
        reached=float(np.isfinite(numbers).mean()),
    )


def mean_band(
    values: NDArray[np.float64], clusters: Sequence[int], *, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean over searches and its bootstrap band: mean, low, high, each (n_columns,).

    ``values`` has shape (n_searches, n_columns). For ``clusters`` see :func:`draws`.
    """
    member, counts = draws(clusters, seed=seed)
    sums = np.zeros((counts.shape[1], values.shape[1]))
    np.add.at(sums, member, values)
    sizes = np.bincount(member, minlength=counts.shape[1])
    low, high = _ends((counts @ sums) / (counts @ sizes)[:, None])
    return np.asarray(values.mean(axis=0)), low, high


def draws(clusters: Sequence[int], *, seed: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw the resamples of a bootstrap (Efron 1979) over clusters, with replacement.

    ``clusters`` has the table of each search, because searches on one table resemble each other. If
    all searches ran on one table, the searches themselves are drawn; the band then covers other
    seeds on this table, and not other tables.

    Returns the member that each search belongs to, shape (n_searches,), and how often each resample
    draws each member, shape (RESAMPLES, n_members). Raises ConfigError without any search.
    """
    if not len(clusters):
        message = "no search to sum up"
        raise ConfigError(message, hint="give at least one seed")
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    if not member.any():
        member = np.arange(len(clusters))
    members = int(member.max()) + 1
    rng = np.random.default_rng([seed, Stream.BOOTSTRAP])
    counts = rng.multinomial(members, np.full(members, 1.0 / members), size=RESAMPLES)
    return member, counts


def first_at(values: NDArray[np.float64], goal: float) -> float:
    """Return the position, from 1, of the first value of at least ``goal``; infinity if none."""
    reached = values >= goal
    return float(np.argmax(reached)) + 1.0 if reached.any() else math.inf


def at_costs(
    costs: NDArray[np.float64],
    values: NDArray[np.float64],
    grid: NDArray[np.float64],
    before: float,
) -> NDArray[np.float64]:
    """Return the value known after spending each cost of a grid, in the shape of ``grid``.

    ``values[k]`` is known from ``costs[k]`` on; ``costs`` never falls. ``before`` is the value
    before the first cost. At equal costs the last value counts.
    """
    place = np.searchsorted(costs, grid, side="right")
    return np.concatenate([[before], values])[place]


def _ends(drawn: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of the percentile band over resamples, shape (n_columns,) each."""
    tail = (1.0 - COVERAGE) / 2.0
    # Without interpolation, which is undefined between infinities.
    low, high = np.quantile(drawn, [tail, 1.0 - tail], axis=0, method="inverted_cdf")
    return low, high


def _median(numbers: NDArray[np.float64]) -> float:
    """Return the median; infinite if either of the two middle numbers is."""
    ordered = np.sort(numbers)
    below, above = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float(below) if below == above else float((below + above) / 2.0)
