"""Rates of the same work on several numbers of ranks, with their prices and power.

Price and power come from an option, a table or the file of the measured cluster. Tables that others
measured are read from JSON, one table or ``{"tables": [...]}``, or CSV; docs/how-to/scaling.md
describes the keys.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.tomltable import Choice, Key, convert, kept, number_from, word, wrong

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster


Law = Literal["strong", "weak"]


def money(amount: str, currency: str) -> str:
    """Format an amount for people; without a currency, only the number."""
    if currency == "USD":
        return f"${amount}"
    return f"{amount} {currency}" if currency else amount


THOUSAND = 1000
"""Samples whose cost is given if only a throughput is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    world_size: int
    """Number of ranks; each has a GPU if there are any."""
    rates: tuple[float, ...]
    """Rate of each repeat, sorted: samples per second, or units of `Series.work` per second."""
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
    """The same work on several world sizes."""

    name: str
    points: tuple[Point, ...]
    """Points in order of world size, each world size once."""
    variation: Mapping[str, int] = field(default_factory=dict)
    """Values of the settings that ``--vary`` compares; empty if none do."""
    law: Law = "strong"
    """Whether all ranks share a fixed batch, or each brings its own."""
    work: str = "1,000 samples"
    """The work to which GPU-hours and costs refer."""
    work_size: float = float(THOUSAND)
    """Amount of work in the unit of ``rates``: 1,000 samples, or 1 epoch."""
    work_samples: float | None = float(THOUSAND)
    """Number of samples in the work; None if unknown."""
    currency: str = ""
    """Currency of the prices, such as USD; "" if unknown."""
    watts_per_gpu: float | None = None
    """Power of a busy GPU where none was measured; None if unknown."""
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


def of_samples(series: Series, samples: int | None) -> Series:
    """Return the series with the work of N samples; as it is if that is not known."""
    if samples is None or series.work_samples is None:
        return series
    size = series.work_size * samples / series.work_samples
    return replace(series, work=f"{samples:,} samples", work_size=size, work_samples=float(samples))


def priced(
    series: Series, *, price_per_gpu_hour: float | None = None, cluster: str | None = None
) -> Series:
    """Return the series with prices and power, and with notes on their sources.

    A given price replaces every other price. ``cluster`` is the cluster whose file is read instead
    of the measured one's; prices of a table are kept. Without it only the file of the cluster that
    the records name is read: this machine may belong to another cluster.

    Raises ConfigError if ``cluster`` cannot be loaded.
    """
    site, told = _site(series, cluster)
    if price_per_gpu_hour is not None:
        currency = series.currency or (site.currency if site is not None else "")
        price = money(f"{price_per_gpu_hour:g}", currency)
        told = [f"price: {price} per GPU-hour, by --price-per-gpu-hour"]
        series = replace(series.at_price(price_per_gpu_hour, "world_size"), currency=currency)
    elif site is not None and all(point.price_per_hour is None for point in series.points):
        series, told = _with_price(series, site)
    unknown = any("gpu_power_w" not in point.details for point in series.points)
    if site is not None and site.watts_per_gpu is not None and series.device != "cpu" and unknown:
        power = f"{site.watts_per_gpu:g} W per GPU where none was measured"
        told.append(f"power: {power}, by {site.written('watts_per_gpu')}")
        series = replace(series, watts_per_gpu=site.watts_per_gpu)
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


_UNITS = {"samples_per_s": 0, "seconds": 1, "hours": 3600}
"""Units of a table's values with their seconds: a throughput (0), or the time of the work."""


def read_json(text: str, where: str) -> tuple[Series, ...]:
    """Read the tables of a JSON text. Raises ConfigError, which names the table and the key."""
    try:
        found = json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        message = f"{where}: not JSON: {error}"
        raise ConfigError(message, hint="docs/how-to/scaling.md shows a table") from error
    tables = found.get("tables", [found]) if isinstance(found, dict) else None
    if not isinstance(tables, list) or not tables:
        raise wrong(where, tables, "a table or a list of tables")
    return tuple(_series(one, f"{where}, table {n}") for n, one in enumerate(tables, start=1))


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def read_csv(text: str, where: str) -> tuple[Series, ...]:
    """Read a table with columns ``world_size``, one of the units and maybe ``price_per_hour``.

    Rows with the same world size are repeats. Raises ConfigError, which names the line.
    """
    rows = csv.DictReader(io.StringIO(text))
    names = [name.strip() for name in rows.fieldnames or ()]
    units = [name for name in names if name in _UNITS]
    unknown = sorted({*names} - {*_UNITS, "world_size", "price_per_hour", "repeat"})
    if "world_size" not in names or len(units) != 1 or unknown:
        message = f"{where}: its columns are {', '.join(names) or 'none'}"
        hint = f"name them world_size, one of {', '.join(_UNITS)}, and price_per_hour if known"
        raise ConfigError(message, hint=hint)
    points: dict[float, dict[str, Any]] = {}
    for row in rows:
        at = f"{where}:{rows.line_num}"
        if None in row:
            message = f"{at}: it has more cells than the header"
            raise ConfigError(message, hint="write numbers without thousands separators")
        cells = {str(key).strip(): (value or "").strip() for key, value in row.items()}
        size = _parsed(cells["world_size"], at)
        point = points.setdefault(size, {"world_size": size, "values": []})
        point["values"].append(_parsed(cells[units[0]], at))
        if cells.get("price_per_hour"):
            point["price_per_hour"] = _parsed(cells["price_per_hour"], at)
    return (_series({"name": where, "unit": units[0], "points": [*points.values()]}, where),)


def _parsed(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise wrong(where, text, "a number such as 12.5") from error


# Beyond 1e15, or below 1e-15, results would be infinite or 0.
_price = number_from(0, 1e15, "0 or more, and at most 1e15")
_measured = number_from(1e-15, 1e15, "above 0, and at most 1e15")
_list = kept(lambda value: isinstance(value, list), "a list")
_POINT: dict[str, Key] = {
    "world_size": (
        "world_size",
        kept(
            lambda value: type(value) in (int, float) and 1 <= value < 1e9 and value % 1 == 0,
            "a whole number from 1",
        ),
    ),
    "value": ("rates", lambda value, where: [_measured(value, where)]),
    "values": (
        "rates",
        lambda value, where: [_measured(one, where) for one in _list(value, where)],
    ),
    "price_per_hour": ("price_per_hour", _price),
}
_TABLE: dict[str, Key] = {
    "name": ("name", lambda value, _: str(value)),
    "unit": ("unit", Choice(tuple(_UNITS))),
    "work": ("work", lambda value, _: str(value)),
    "samples": ("work_samples", _measured),
    "law": ("law", Choice(("strong", "weak"))),
    "price_per_gpu_hour": ("price_per_gpu_hour", _price),
    "currency": ("currency", word),
    "points": ("points", _list),
    "notes": ("notes", _list),
    "source": ("source", lambda value, _: f"source: {value}"),
}


def _fields(value: object, keys: dict[str, Key], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return convert(value, keys, where)


def _series(table: object, where: str) -> Series:
    given = {"name": where, "points": [], "notes": [], **_fields(table, _TABLE, where)}
    unit_s = _UNITS[given.pop("unit", "samples_per_s")]
    if unit_s:
        given = {"work": "the work", "work_samples": None, **given, "work_size": 1.0}
    else:
        samples = given.get("work_samples") or float(THOUSAND)
        given |= {"work_samples": samples, "work_size": samples, "work": f"{samples:,.0f} samples"}
    source = [given.pop("source")] if "source" in given else []
    notes = (*map(str, given["notes"]), *source)
    each = given.pop("price_per_gpu_hour", None)
    points = tuple(_point(one, unit_s, each, f"{where}, points") for one in given["points"])
    return Series(**{**given, "points": points, "notes": notes})


def _point(point: object, unit_s: int, price_per_gpu_hour: float | None, where: str) -> Point:
    given = _fields(point, _POINT, where)
    both = isinstance(point, dict) and {"value", "values"} <= point.keys()
    if both or "world_size" not in given or not given.get("rates"):
        message = f"{where}: {point!r:.200} is not a world_size with one value, or a list of values"
        raise ConfigError(message, hint="docs/how-to/scaling.md lists the keys")
    size = int(given["world_size"])
    if unit_s:
        given["rates"] = [1 / (number * unit_s) for number in given["rates"]]
    if price_per_gpu_hour is not None:
        given.setdefault("price_per_hour", price_per_gpu_hour * size)
    return Point(**{**given, "world_size": size})
