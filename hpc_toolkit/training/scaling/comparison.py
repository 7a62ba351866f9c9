"""Compare the world sizes of a series, and judge them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import HOUR_S

if TYPE_CHECKING:
    from hpc_toolkit.training.scaling.series import Point, Series


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One world size compared with the smallest one."""

    world_size: int
    repeats: int
    rate: float
    """Median over repeats, in samples per second."""
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
    """Hours for the samples of the series."""
    gpu_hours: float
    premium: float
    """Extra cost of the samples, as a share of its cost on the smallest world size."""
    cost: float | None
    """Cost of the samples; None without a price."""
    cost_per_1000: float | None
    """Cost of 1,000 samples; None without a price."""
    shares: Mapping[str, float]
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    series: Series
    rows: tuple[Row, ...]


def compare(series: Series) -> Comparison:
    """Compare the world sizes of a series with the smallest of them."""
    return Comparison(
        series=series,
        rows=tuple(_row(series, point) for point in series.points),
    )


def _row(series: Series, point: Point) -> Row:
    base = series.base
    ideal = point.world_size / base.world_size
    speedup = point.rate / base.rate
    hours = series.samples / point.rate / HOUR_S
    cost, of_base = (
        None
        if one.price_per_hour is None
        else one.price_per_hour * series.samples / one.rate / HOUR_S
        for one in (point, base)
    )
    premium = ideal / speedup if cost is None or not of_base else cost / of_base
    gpu_hours = hours * point.world_size
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
        cost_per_1000=None if cost is None else cost * 1000 / series.samples,
        shares=point.shares,
        details=point.details,
    )


GOOD = 0.9
"""Efficiency from which on more ranks cost hardly more."""

FAIR = 0.85
"""Lowest efficiency that is advised unless the user gives another one."""

POSSIBLE = 1.01
"""Highest efficiency that rounding can explain; more ranks cannot explain a higher one."""

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
        reasons=tuple(_reasons(rows, chosen, minimum)),
    )


def _reasons(rows: tuple[Row, ...], chosen: Row, minimum: float) -> Iterator[str]:
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
