"""Rates of the same training on several numbers of ranks, with their prices.

Prices come from an option or the file of the measured cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError

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
    shares: Mapping[str, float] = field(default_factory=dict)
    """Shares of a step, 0 to 1, such as ``communication`` and ``loading``."""
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
    variation: Mapping[str, int] = field(default_factory=dict)
    """Values of the settings that ``--vary`` compares; empty if none do."""
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
