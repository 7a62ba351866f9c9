"""Rates of a training on several numbers of ranks, with their prices: compared and judged.

Prices come from an option or the file of the measured cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import HOUR_S

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster


Law = Literal["strong", "weak"]


def money(amount: str, currency: str) -> str:
    """Format an amount for people; without a currency, only the number."""
    if currency == "USD":
        return f"${amount}"
    return f"{amount} {currency}" if currency else amount


THOUSAND = 1000
"""Samples whose cost is given unless the user names a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    world_size: int
    """Number of ranks; each has a GPU if there are any."""
    rates: tuple[float, ...]
    """Samples per second of each repeat, sorted."""
    price_per_hour: float | None = None
    """Price of all ranks together; None if unknown."""
    nodes: int | None = None
    """Nodes of these ranks; None if unknown."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers of the records, medians over repeats; the advice does not depend on them."""

    def __post_init__(self) -> None:
        # Sort, so that the order of reading changes nothing.
        object.__setattr__(self, "rates", tuple(sorted(self.rates)))

    @property
    def rate(self) -> float:
        return median(self.rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The same training on several world sizes."""

    name: str
    points: tuple[Point, ...]
    """Points in order of world size, each world size once."""
    law: Law = "strong"
    """Whether all ranks share a fixed batch, or each brings its own."""
    samples: int = THOUSAND
    """Samples to which times, GPU-hours and costs refer."""
    currency: str = ""
    """Currency of the prices, such as USD; "" if unknown."""
    device: str = ""
    """Device of the ranks: ``cpu``, or a GPU's name; "" if unknown."""
    cluster: str = ""
    """Cluster of all measurements, as ``--cluster`` takes it; "" if unknown or not the same."""
    partition: str = ""
    """Partition of all measurements; "" if unknown or not the same."""
    notes: tuple[str, ...] = ()
    """Facts that a reader must know, such as ranks that shared CPUs."""

    def __post_init__(self) -> None:
        sizes = [point.world_size for point in self.points]
        if not sizes:
            message = f"{self.name}: no world size was measured"
            raise ConfigError(message, hint="measure with 'hpctk scaling run'")
        twice = sorted({size for size in sizes if sizes.count(size) > 1})
        if twice:
            message = f"{self.name}: world size {twice[0]} appears twice"
            raise ConfigError(message, hint="repeats of one world size are one point")
        ordered = tuple(sorted(self.points, key=lambda point: point.world_size))
        object.__setattr__(self, "points", ordered)

    @property
    def work(self) -> str:
        """The samples to which times and costs refer, as text."""
        return f"{self.samples:,} samples"

    @property
    def base(self) -> Point:
        """The smallest world size, with which all others are compared."""
        return self.points[0]

    def at_price(self, price: float, per: Literal["nodes", "world_size"]) -> Series:
        """Return the series with a price per hour of each node or rank, if they are known."""
        points = (
            replace(point, price_per_hour=price * count)
            if (count := getattr(point, per))
            else point
            for point in self.points
        )
        return replace(self, points=tuple(points))


def priced(
    series: Series, *, price_per_gpu_hour: float | None = None, cluster: str | None = None
) -> Series:
    """Return the series with prices, and with notes on their sources.

    A given price replaces every other price. ``cluster`` is the cluster whose file is read instead
    of the measured one's. Without it only the file of the cluster that
    the records name is read: this machine may belong to another cluster.

    Raises ConfigError if ``cluster`` cannot be loaded.
    """
    site, told = _site(series, cluster)
    if price_per_gpu_hour is not None:
        currency = series.currency or (site.currency if site is not None else "")
        price = money(f"{price_per_gpu_hour:g}", currency)
        told = [f"price: {price} per GPU-hour, by --price-per-gpu-hour"]
        series = replace(series.at_price(price_per_gpu_hour, "world_size"), currency=currency)
    elif site is not None:
        series, told = _with_price(series, site)
    return replace(series, notes=(*series.notes, *told))


def _site(series: Series, given: str | None) -> tuple[Cluster | None, list[str]]:
    """Return the cluster whose file is used, and notes on why there is none."""
    from hpc_toolkit.slurm.clusters.choice import named_site
    from hpc_toolkit.slurm.clusters.facts import load_cluster
    from hpc_toolkit.slurm.clusters.fitting import with_gpus

    name = given or series.cluster
    if not name:
        return None, []
    try:
        return with_gpus(named_site(load_cluster(name), series.partition), None), []
    except ConfigError as error:
        if given:
            raise
        return None, [f"no price: it was measured on {name}: {error.message}"]


def _with_price(series: Series, site: Cluster) -> tuple[Series, list[str]]:
    node = site.price_per_node_hour
    if series.device == "cpu":
        parts, unit = {"price_per_node_hour": node}, "node and hour"
        missing = "price_per_node_hour, and ranks used CPUs"
    else:
        # A job uses a part of a node, and pays for that part.
        share = node / site.gpus_per_node if node is not None and site.gpus_per_node else None
        parts = {"price_per_gpu_hour": site.price_per_gpu_hour, "price_per_node_hour": share}
        unit, missing = "GPU-hour", "price_per_gpu_hour"
    known = {key: part for key, part in parts.items() if part is not None}
    if not known:
        return series, [f"no price: {site.file} has no {missing}"]
    each = sum(known.values())
    found = series.at_price(each, "nodes" if series.device == "cpu" else "world_size")
    where = " and ".join(map(site.written, known))
    told = f"price: {money(f'{each:g}', site.currency)} per {unit}, by {where}"
    return replace(found, currency=site.currency), [told, *_elsewhere(series, site)]


def _elsewhere(series: Series, site: Cluster) -> list[str]:
    """Return notes if a price is for another cluster or another GPU than the measured one."""
    if not series.device:
        return []
    notes = []
    if series.cluster not in (site.name, site.argument):
        where = series.cluster or "a machine whose cluster no record names"
        notes.append(f"it was measured on {where}, and the price is of {site.name}")
    kind = site.gpu_type or ""
    if series.device != "cpu" and kind.lower() not in series.device.lower():
        notes.append(f"it was measured on {series.device}, and the price is of GPUs {kind!r}")
    return notes


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
        details=point.details,
    )


GOOD = 0.9
"""Efficiency from which on more ranks cost hardly more."""

FAIR = 0.85
"""Lowest efficiency that is advised unless the user gives another one."""

POSSIBLE = 1.01
"""Highest efficiency that rounding can explain; more ranks cannot explain a higher one."""


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
    yield from _doubts(rows, minimum)


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
