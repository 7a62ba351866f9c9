"""Read scaling tables that others measured, from JSON or CSV.

JSON holds one table, or ``{"tables": [...]}``; docs/how-to/scaling.md describes the keys.
"""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.tomltable import Choice, Key, convert, kept, number_from, word, wrong
from hpc_toolkit.training.scaling.series import THOUSAND, Point, Series

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
