"""Read scaling tables that others measured, from JSON or CSV, and check claims about them.

JSON holds one table, or ``{"tables": [...]}``; docs/how-to/scaling.md describes the keys. Numbers
keep their written digits, since a claim of "7.6x" is more precise than one of "8x".
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.tomltable import Choice, Key, convert, word, wrong
from hpc_toolkit.training.scaling.series import THOUSAND, Claim, Point, Series, money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.training.scaling.comparison import Comparison, Row

_UNITS = {"samples_per_s": 0, "seconds": 1, "hours": 3600}
"""Units of a table's values with their seconds: a throughput (0), or the time of the work."""


def read_json(text: str, where: str) -> tuple[Series, ...]:
    """Read the tables of a JSON text. Raises ConfigError, which names the table and the key."""
    try:
        found = json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refused)
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
    points: dict[Decimal, dict[str, Any]] = {}
    for row in rows:
        at = f"{where}:{rows.line_num}"
        if None in row:
            message = f"{at}: it has more cells than the first line"
            raise ConfigError(message, hint="write numbers without thousands separators")
        cells = {str(key).strip(): (value or "").strip() for key, value in row.items()}
        size = _decimal(cells["world_size"], at)
        point = points.setdefault(size, {"world_size": size, "values": []})
        point["values"].append(_decimal(cells[units[0]], at))
        if cells.get("price_per_hour"):
            point["price_per_hour"] = _decimal(cells["price_per_hour"], at)
    return (_series({"name": where, "unit": units[0], "points": [*points.values()]}, where),)


def _decimal(text: str, where: str) -> Decimal:
    try:
        return Decimal(text)
    except ArithmeticError as error:
        raise wrong(where, text, "a number such as 12.5") from error


def _number(value: object, where: str) -> Decimal:
    # Far beyond these bounds a float would be infinite or 0.
    if isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) <= 15:
        return value
    raise wrong(where, str(value) if isinstance(value, Decimal) else value, "a number such as 12.5")


def _from_0(value: object, where: str) -> float:
    number = float(_number(value, where))
    if number < 0:
        raise wrong(where, number, "0 or more")
    return number


def _above_0(value: object, where: str) -> float:
    number = float(_number(value, where))
    if number <= 0:
        raise wrong(where, number, "above 0")
    return number


def _whole(value: object, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or number < 1:
        raise wrong(where, float(number), "a whole number from 1")
    return int(number)


def _words(value: object, _: str) -> str:
    return str(value)


def _list(value: object, where: str) -> list[Any]:
    if isinstance(value, list):
        return value
    raise wrong(where, value, "a list")


def _rates(value: object, where: str) -> tuple[float, ...]:
    if not _list(value, where):
        raise wrong(where, value, "a list of one number or more")
    return tuple(_above_0(one, where) for one in _list(value, where))


def _fields(value: object, keys: dict[str, Key], needed: tuple[str, ...], where: str) -> Any:
    """Convert an object of the table; ``needed`` are keys that it must have."""
    if not isinstance(value, dict):
        raise wrong(where, value, "an object")
    for key in needed:
        if key not in value:
            message = f"{where}: {key} is missing"
            raise ConfigError(message, hint="docs/how-to/scaling.md lists the keys")
    return convert(value, keys, where)


_POINT: dict[str, Key] = {
    "world_size": ("world_size", _whole),
    "value": ("value", lambda value, where: _rates([value], where)),
    "values": ("values", _rates),
    "price_per_hour": ("price_per_hour", _from_0),
}


def _series(table: object, where: str) -> Series:
    given = _fields(table, _TABLE, (), where)
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
    given = _fields(point, _POINT, ("world_size",), where)
    at = f"{where}, world size {given['world_size']}"
    written = [given.pop(key) for key in ("value", "values") if key in given]
    if len(written) != 1:
        message = f"{at}: {'value and values are both there' if written else 'value is missing'}"
        raise ConfigError(message, hint="write one value, or a list of them, one for each repeat")
    rates = tuple(1 / (number * unit_s) if unit_s else number for number in written[0])
    return Point(rates=rates, **given)


def _claims(value: object, where: str) -> tuple[Claim, ...]:
    return tuple(_claim(one, where) for one in _list(value, where))


def _claim(claim: object, where: str) -> Claim:
    given = _fields(claim, _CLAIM, ("quantity", "value"), where)
    value: Decimal = given.pop("value")
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)  # the value is finite
    half = float(Decimal(5).scaleb(exponent - 1))
    text = given.pop("text", f"{given['quantity']} {value}")
    return Claim(text=text, value=float(value), half=half, **given)


TOLERANCE = 0.01
"""Relative deviation from a claim that is allowed in addition to rounding of its last digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    read: Callable[[Row], float | None]
    words: str
    """Format string, with one place for the number."""
    digits: str = ""
    """Number format of an amount of money within that place; "" for other quantities."""

    def say(self, number: float, currency: str) -> str:
        if not self.digits:
            return self.words.format(number)
        return self.words.format(money(format(number, self.digits), currency))


QUANTITIES: dict[str, Quantity] = {
    "speedup": Quantity(read=lambda row: row.speedup, words="{:.2f}x"),
    "efficiency": Quantity(read=lambda row: row.efficiency, words="{:.1%}"),
    "rate": Quantity(read=lambda row: row.rate, words="{:.4g} a second"),
    "hours": Quantity(read=lambda row: row.hours, words="{:.4g} h"),
    "gpu_hours": Quantity(read=lambda row: row.gpu_hours, words="{:.4g} GPU-hours"),
    "premium": Quantity(read=lambda row: row.premium, words="{:+.1%}"),
    "cost": Quantity(read=lambda row: row.cost, words="{}", digits=".4g"),
    "cost_per_samples": Quantity(
        read=lambda row: row.cost_per_1000, words="{} per 1,000 samples", digits=".3f"
    ),
}
"""Quantities by their names in the input; a cost per samples is compared per 1,000 samples."""

_CLAIM: dict[str, Key] = {
    "text": ("text", _words),
    "quantity": ("quantity", Choice(tuple(QUANTITIES))),
    "value": ("value", _number),
    "world_size": ("world_size", _whole),
    "samples": ("samples", _whole),
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
    "claims": ("claims", _claims),
    "notes": ("notes", _list),
    "source": ("source", _words),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one claim, or for two claims that cannot both hold."""

    text: str
    verdict: str
    """``reproduced``, ``contradicted``, ``contradictory`` (two claims) or ``unknown``."""
    computed: str


def check_claims(comparison: Comparison) -> tuple[Finding, ...]:
    """Return a finding for every claim, then one for every pair of contradictory claims."""
    claims = comparison.series.claims
    found = [_check(claim, comparison) for claim in claims]
    found += [
        finding
        for one, other in combinations(claims, 2)
        for finding in _contradictions(one, other, comparison)
    ]
    return tuple(found)


def _check(claim: Claim, comparison: Comparison) -> Finding:
    currency = comparison.series.currency
    quantity = QUANTITIES[claim.quantity]
    value, half = _normal(claim)
    known = [
        (row.world_size, number)
        for row in comparison.rows
        if claim.world_size in (None, row.world_size) and (number := quantity.read(row)) is not None
    ]
    if not known:
        return Finding(
            text=claim.text, verdict="unknown", computed="nothing is known to hold it to"
        )
    fitting = [(size, number) for size, number in known if _agree(value, half, number)]
    told = fitting or known
    computed = ", ".join(f"{quantity.say(number, currency)} on {size}" for size, number in told)
    return Finding(
        text=claim.text,
        verdict="reproduced" if fitting else "contradicted",
        computed=computed,
    )


def _contradictions(one: Claim, other: Claim, comparison: Comparison) -> Iterator[Finding]:
    if one.world_size != other.world_size:
        return
    base = comparison.series.base.world_size
    first, second = _as_efficiency(one, base), _as_efficiency(other, base)
    if first[0] != second[0]:
        return
    kind, value, half = first
    _, other_value, other_half = second
    if _agree(value, half + other_half, other_value):
        return
    say, currency = QUANTITIES[kind].say, comparison.series.currency
    yield Finding(
        text=f"{one.text!r} and {other.text!r}",
        verdict="contradictory",
        computed=f"{say(value, currency)} against {say(other_value, currency)}",
    )


def _as_efficiency(claim: Claim, base: int) -> tuple[str, float, float]:
    """Return quantity, value and half digit; a speed-up at a world size becomes an efficiency."""
    value, half = _normal(claim)
    if claim.quantity == "speedup" and claim.world_size is not None:
        ideal = claim.world_size / base
        return "efficiency", value / ideal, half / ideal
    return claim.quantity, value, half


def _normal(claim: Claim) -> tuple[float, float]:
    if claim.quantity == "cost_per_samples":
        return claim.value * THOUSAND / claim.samples, claim.half * THOUSAND / claim.samples
    return claim.value, claim.half


def _agree(value: float, half: float, number: float) -> bool:
    return abs(number - value) <= half + TOLERANCE * abs(value)
