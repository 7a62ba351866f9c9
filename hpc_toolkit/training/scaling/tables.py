"""Read scaling tables that others measured, from JSON or CSV.

JSON holds one table, or ``{"tables": [...]}``; docs/how-to/scaling.md describes the keys.
"""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.tomltable import Choice, Key, convert, word, wrong
from hpc_toolkit.training.scaling.series import THOUSAND, Point, Series

_UNITS = {"samples_per_s": 0, "seconds": 1, "hours": 3600}
"""Units of a table's values with their seconds: a throughput (0), or the time of the work."""
_FARTHEST = 1e15
"""Far beyond this, or below its inverse, results would be infinite or 0."""


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
    message = f"{constant} is not a number"
    raise ValueError(message)


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
            message = f"{at}: it has more cells than the first line"
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


def _from_0(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(where, value, "a number such as 12.5")
    if not math.isfinite(value) or not 0 <= value <= _FARTHEST:
        raise wrong(where, value, "0 or more, and at most 1e15")
    return float(value)


def _above_0(value: object, where: str) -> float:
    number = _from_0(value, where)
    if number < 1 / _FARTHEST:
        raise wrong(where, value, "above 0")
    return number


def _whole(value: object, where: str) -> int:
    number = _from_0(value, where)
    if number != int(number) or number < 1:
        raise wrong(where, value, "a whole number from 1")
    return int(number)


def _words(value: object, _: str) -> str:
    return str(value)


def _list(value: object, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise wrong(where, value, "a list")


def _values(value: object, where: str) -> tuple[float, ...]:
    if not _list(value, where):
        raise wrong(where, value, "a list of one number or more")
    return tuple(_above_0(one, where) for one in _list(value, where))


_POINT: dict[str, Key] = {
    "world_size": ("world_size", _whole),
    "value": ("value", lambda value, where: _values([value], where)),
    "values": ("values", _values),
    "price_per_hour": ("price_per_hour", _from_0),
}
_TABLE: dict[str, Key] = {
    "name": ("name", _words),
    "unit": ("unit", Choice(tuple(_UNITS))),
    "work": ("work", _words),
    "samples": ("samples", _from_0),
    "law": ("law", Choice(("strong", "weak"))),
    "price_per_gpu_hour": ("price_per_gpu_hour", _from_0),
    "currency": ("currency", word),
    "points": ("points", _list),
    "notes": ("notes", _list),
    "source": ("source", _words),
}


def _fields(value: object, keys: dict[str, Key], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    return convert(value, keys, where)


def _series(table: object, where: str) -> Series:
    given = _fields(table, _TABLE, where)
    name, unit = given.pop("name", where), given.pop("unit", "samples_per_s")
    source, samples = given.pop("source", None), given.pop("samples", None)
    points = given.pop("points", [])
    notes = [*map(str, given.pop("notes", [])), *([] if source is None else [f"source: {source}"])]
    if unit == "samples_per_s":
        samples = samples or float(THOUSAND)
        given |= {"work": f"{samples:,.0f} samples", "work_size": samples}
    else:
        given = {"work": "the work", **given, "work_size": 1.0}
    return Series(
        name=name,
        points=tuple(_point(one, _UNITS[unit], f"{where}, points") for one in points),
        work_samples=samples,
        notes=tuple(notes),
        **given,
    )


def _point(point: object, unit_s: int, where: str) -> Point:
    given = _fields(point, _POINT, where)
    if "world_size" not in given:
        message = f"{where}: world_size is missing"
        raise ConfigError(message, hint="docs/how-to/scaling.md lists the keys")
    at = f"{where}, world size {given['world_size']}"
    written = [given.pop(key) for key in ("value", "values") if key in given]
    if len(written) != 1:
        message = f"{at}: {'value and values are both there' if written else 'value is missing'}"
        raise ConfigError(message, hint="write one value, or a list of them, one for each repeat")
    rates = tuple(1 / (number * unit_s) if unit_s else number for number in written[0])
    return Point(rates=rates, **given)
