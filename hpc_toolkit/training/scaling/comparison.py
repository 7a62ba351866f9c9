"""Compare the world sizes of a series, fit Amdahl's or Gustafson's law, and judge them.

Both laws are linear. Amdahl (1967): a fixed amount of work takes the time a + b / n on n ranks.
Gustafson (1988): n ranks with work of their own do a + b n in a given time. The serial share, which
more ranks do not shorten, is a / (a + b) in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import HOUR_S

if TYPE_CHECKING:
    from hpc_toolkit.training.scaling.series import Law, Point, Series


# Student's t, 97.5 %, by degrees of freedom from 1 (Abramowitz and Stegun 1964, table 26.10).
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_NORMAL = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialShare:
    """A fitted law and its uncertainty."""

    law: Law
    """``strong`` is Amdahl's, ``weak`` is Gustafson's."""
    share: float
    """The serial share, 0 to 1."""
    raw: float
    """The share before clipping to 0 to 1; below 0 the speed-up was more than proportional."""
    low: float | None
    """Lower end of the 95 % interval; None with two world sizes: any two points are on a line."""
    high: float | None
    points: int
    worst: float
    """The largest deviation of a point from the line, as a share of the point."""

    @property
    def name(self) -> str:
        return "Amdahl" if self.law == "strong" else "Gustafson"


def fit(series: Series) -> SerialShare | None:
    """Fit the serial share of a series; return None with one world size.

    The fit is least squares on relative errors, over the medians of the world sizes: repeats on
    one machine are too similar to count as separate points. The interval uses Student's t, with the
    number of world sizes minus two as degrees of freedom, so it is wide for three points.
    """
    import numpy as np

    if len(series.points) < 2:
        return None
    power = -1 if series.law == "strong" else 1
    xs = [float(point.world_size) ** power for point in series.points]
    # The share does not depend on the unit of the rates, but tiny numbers would add to its errors.
    ys = [(point.rate / series.base.rate) ** power for point in series.points]
    weights = 1 / np.array(ys)
    if len(xs) == 2:
        (b, a), covariance = np.polyfit(xs, ys, 1, w=weights).tolist(), None
    else:
        line, covariance = np.polyfit(xs, ys, 1, w=weights, cov=True)
        b, a = line.tolist()
    raw = a / (a + b) if a + b > 0 else 1.0
    share = min(max(raw, 0.0), 1.0)
    low = high = None
    if covariance is not None:
        # To first order in the errors of a and b.
        slope = np.array([-a, b]) / (a + b) ** 2
        free = len(xs) - 2
        student = _STUDENT[free - 1] if free <= len(_STUDENT) else _NORMAL
        half = student * math.sqrt(max(0.0, float(slope @ covariance @ slope)))
        low, high = max(0.0, raw - half), min(1.0, raw + half)
        low, high = min(low, share), max(high, share)
    return SerialShare(
        law=series.law,
        share=share,
        raw=raw,
        low=low,
        high=high,
        points=len(xs),
        worst=max(abs(a + b * x - y) / y for x, y in zip(xs, ys, strict=True)),
    )


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
    series: Series
    rows: tuple[Row, ...]
    serial: SerialShare | None


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
    cost, of_base = (
        None
        if one.price_per_hour is None
        else one.price_per_hour * series.work_size / one.rate / HOUR_S
        for one in (point, base)
    )
    premium = ideal / speedup if cost is None or not of_base else cost / of_base
    samples = series.work_samples
    gpu_hours = hours * point.world_size
    watts = point.details.get("gpu_power_w", series.watts_per_gpu)
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
        gpu_hours=gpu_hours,
        premium=premium - 1,
        cost=cost,
        cost_per_1000=None if cost is None or not samples else cost * 1000 / samples,
        energy_kwh=None if watts is None else watts * gpu_hours / 1000,
        shares=point.shares,
        details=point.details,
    )


GOOD = 0.9
"""Efficiency from which on more ranks cost hardly more."""

FAIR = 0.85
"""Lowest efficiency that is advised unless the user gives another one."""

POSSIBLE = 1.01
"""Highest efficiency that rounding can explain; more ranks cannot explain a higher one."""

OPEN = 0.5
"""Width of the serial share's interval above which the fitted law says nothing."""

NOTABLE = 0.1
"""Smallest share of a step that is mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One series judged by the lowest wanted efficiency."""

    word: str
    """``good``, ``fair`` or ``poor`` for the largest world size; ``unknown`` if it is alone."""
    world_size: int
    """The advised size: the largest up to which every efficiency is at least ``minimum``."""
    minimum: float
    below: tuple[int, ...]
    """World sizes whose efficiency is below ``minimum``."""
    certain: bool
    """Whether every pair of repeats gives the same advice; True without repeats."""
    reasons: tuple[str, ...]
    """Sentences with the numbers that decided."""


def judge(comparison: Comparison, minimum: float = FAIR) -> Verdict:
    """Judge a comparison; ``minimum`` is an efficiency, 0 to 1."""
    rows = comparison.rows
    below = tuple(row.world_size for row in rows if row.efficiency < minimum)
    chosen = rows[0]
    for row in rows:
        if row.efficiency < minimum:
            break
        chosen = row
    last = rows[-1].efficiency
    word = "good" if last >= max(GOOD, minimum) else "fair" if last >= minimum else "poor"
    return Verdict(
        word="unknown" if len(rows) == 1 else word,
        world_size=chosen.world_size,
        minimum=minimum,
        below=below,
        certain=not any(_unsure(row, minimum) for row in rows[1:]),
        reasons=tuple(_reasons(comparison, chosen, minimum)),
    )


def _reasons(comparison: Comparison, chosen: Row, minimum: float) -> Iterator[str]:
    rows = comparison.rows
    if len(rows) == 1:
        yield "one world size says nothing about scaling"
        return
    if chosen is not rows[0]:
        yield (
            f"on {chosen.world_size} it is {chosen.speedup:.2f} times as fast as on "
            f"{rows[0].world_size}, at {chosen.efficiency:.1%} of the ideal and "
            f"{chosen.premium:+.1%} cost"
        )
    after = [row for row in rows if row.world_size > chosen.world_size]
    if after:
        worse = after[0]
        yield (
            f"on {worse.world_size} the efficiency is {worse.efficiency:.1%}, below {minimum:.0%}: "
            f"the same work costs {worse.premium:+.1%}"
        )
    yield from _causes(rows[-1])
    yield from _doubts(rows, minimum)
    yield from _law(comparison)


_CAUSES = {
    "communication": (
        "exchanging gradients",
        "a larger batch, or --vary accumulate=1,2,4, exchanges less often",
    ),
    "loading": ("waiting for data", "--vary loader-workers=1,4,8 tells whether more loaders help"),
}
"""For each share of a step: what ranks do in it, and what can make it smaller."""


def _causes(row: Row) -> Iterator[str]:
    for name, (words, cure) in _CAUSES.items():
        share = row.shares.get(name, 0.0)
        if share < NOTABLE:
            continue
        low, high = (row.details.get(f"{name}_{end}") for end in ("low", "high"))
        told = f"on {row.world_size} {words} takes {share:.0%}"
        if low is not None and high is not None:
            told += f" ({max(low, 0.0):.0%} to {max(high, 0.0):.0%})"
        noisy = low is not None and low <= 0
        way = "it may be noise: more --max-steps or --repeats tell" if noisy else cure
        yield f"{told} of a step; {way}"


def _unsure(row: Row, minimum: float) -> bool:
    return row.repeats > 1 and row.low < minimum <= row.high


def _doubts(rows: tuple[Row, ...], minimum: float) -> Iterator[str]:
    for row in rows[1:]:
        if _unsure(row, minimum):
            yield (
                f"on {row.world_size} repeats differ too much to tell: "
                f"{row.low:.1%} to {row.high:.1%}"
            )
        if row.efficiency > POSSIBLE:
            yield (
                f"on {row.world_size} the efficiency is {row.efficiency:.1%}, more than the ranks "
                "explain: caches, rounded numbers, or a smallest world size that was disturbed"
            )


def _law(comparison: Comparison) -> Iterator[str]:
    serial = comparison.serial
    assert serial is not None  # there are several world sizes
    if serial.low is None or serial.high is None:
        yield f"{serial.name}'s law goes through any two points: it predicts nothing here"
        return
    if serial.raw <= 0:
        yield f"{serial.name}'s law finds no serial share"
        return
    if serial.raw >= 1:
        yield f"more ranks are slower, which {serial.name}'s law does not know"
        return
    interval = f"95 % interval: {serial.low:.1%} to {serial.high:.1%}"
    if serial.high - serial.low > OPEN:
        yield f"{serial.name}'s law leaves the serial share open ({interval})"
        return
    yield (
        f"{serial.name}'s law: {serial.share:.1%} of the work is serial ({interval}); "
        f"no point is more than {serial.worst:.1%} from it"
    )
