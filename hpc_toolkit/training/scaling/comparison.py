"""Compare the world sizes of a series: speed-up, efficiency, GPU-hours and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.training.scaling.serialshare import fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.training.scaling.serialshare import SerialShare
    from hpc_toolkit.training.scaling.series import Point, Series

HOUR_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One world size compared with the smallest one."""

    world_size: int
    repeats: int
    rate: float
    """Median over repeats, in the unit of the series."""
    speedup: float
    """The rate divided by the rate of the smallest world size."""
    ideal: float
    """The world size divided by the smallest one."""
    efficiency: float
    """Speed-up divided by ideal; above 1 it is more than the ranks can explain."""
    low: float
    """Lowest efficiency of any pair of repeats; not a confidence interval."""
    high: float
    """Highest efficiency of any pair of repeats."""
    hours: float
    """Hours for the work of the series."""
    gpu_hours: float
    premium: float
    """Extra cost of the work, as a share of its cost on the smallest world size."""
    cost: float | None
    """Cost of the work; None without a price."""
    cost_per_1000: float | None
    """Cost of 1,000 samples; None if the price or the number of samples is unknown."""
    energy_kwh: float | None
    """Energy of the GPUs for the work; None if their power is unknown."""
    shares: Mapping[str, float]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The numbers that the analysis computes from a series."""

    series: Series
    rows: tuple[Row, ...]
    serial: SerialShare | None
    """The fitted law; None with one world size."""


def compare(series: Series) -> Comparison:
    """Compare the world sizes of a series with the smallest of them."""
    return Comparison(
        series=series,
        rows=tuple(_row(series, point) for point in series.points),
        serial=fit(series),
    )


def _row(series: Series, point: Point) -> Row:
    base = series.base
    ideal = point.world_size / base.world_size
    speedup = point.rate / base.rate
    hours = series.work_size / point.rate / HOUR_S
    cost = _cost(series, point)
    of_base = _cost(series, base)
    premium = ideal / speedup if cost is None or not of_base else cost / of_base
    samples = series.work_samples
    watts = series.watts(point)
    return Row(
        world_size=point.world_size,
        repeats=len(point.rates),
        rate=point.rate,
        speedup=speedup,
        ideal=ideal,
        efficiency=speedup / ideal,
        # The smallest world size is compared with itself and has no spread.
        low=1.0 if point is base else point.rates[0] / base.rates[-1] / ideal,
        high=1.0 if point is base else point.rates[-1] / base.rates[0] / ideal,
        hours=hours,
        gpu_hours=hours * point.world_size,
        premium=premium - 1,
        cost=cost,
        cost_per_1000=None if cost is None or not samples else cost * 1000 / samples,
        energy_kwh=None if watts is None else watts * hours / 1000,
        shares=point.shares,
        details=point.details,
    )


def _cost(series: Series, point: Point) -> float | None:
    price = series.price(point)
    return None if price is None else price * series.work_size / point.rate / HOUR_S
