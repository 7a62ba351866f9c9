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

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.training.scaling.series import THOUSAND, Claim, Point, Series, money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hpc_toolkit.training.scaling.comparison import Comparison, Row

_UNITS = {"samples_per_s": 0, "seconds": 1, "hours": 3600}
"""Units of a table's values with their seconds: a throughput (0), or the time of the work."""

_KEYS = {
    *("name", "unit", "work", "samples", "law", "price_per_gpu_hour", "points", "claims"),
    *("notes", "source", "currency"),
}
_POINT_KEYS = {"world_size", "value", "values", "price_per_hour"}
_CLAIM_KEYS = {"text", "quantity", "value", "world_size", "samples"}
_HOW = "docs/how-to/scaling.md shows a table"


def read_json(text: str, where: str) -> tuple[Series, ...]:
    """Read the tables of a JSON text. Raises ConfigError, which names the table and the key."""
    try:
        found = json.loads(text, parse_float=Decimal, parse_int=Decimal, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        message = f"{where}: not JSON: {error}"
        raise ConfigError(message, hint=_HOW) from error
    tables = found.get("tables", [found]) if isinstance(found, dict) else None
    if not isinstance(tables, list) or not tables:
        message = f"{where}: neither a table nor a list of tables"
        raise ConfigError(message, hint=_HOW)
    return tuple(_table(one, f"{where}, table {n}") for n, one in enumerate(tables, start=1))


def _refused(word: str) -> None:
    message = f"{word} is not a number"
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
    return (_table({"name": where, "unit": units[0], "points": [*points.values()]}, where),)


def _decimal(text: str, where: str) -> Decimal:
    try:
        value = Decimal(text)
    except ArithmeticError as error:
        message = f"{where}: {text!r} is not a number"
        raise ConfigError(message, hint="write digits, such as 12.5") from error
    return _checked(value, where)


def _checked(value: object, where: str) -> Decimal:
    # Far beyond these bounds a float would be infinite or 0.
    if not isinstance(value, Decimal) or not value.is_finite() or abs(value.adjusted()) > 15:
        message = (
            f"{where}: {value if value is not None else 'nothing'} is not a number that is usable"
        )
        raise ConfigError(message, hint="write a number such as 12.5, without quotes")
    return value


def _from_0(value: object, where: str) -> float:
    number = float(_checked(value, where))
    if number < 0:
        message = f"{where}: {number:g} is below 0"
        raise ConfigError(message, hint="prices and counts are 0 or more")
    return number


def _table(table: object, where: str) -> Series:
    given = _object(table, _KEYS, where)
    name = str(given.get("name", where))
    unit = given.get("unit", "samples_per_s")
    if unit not in _UNITS:
        message = f"{where}: unit is {unit!r}"
        raise ConfigError(message, hint=near_miss(str(unit), list(_UNITS)))
    law = given.get("law", "strong")
    if law not in ("strong", "weak"):
        message = f"{where}: law is {law!r}"
        raise ConfigError(message, hint="strong, or weak")
    points = [_point(one, unit, where) for one in _list(given, "points", where)]
    price = given.get("price_per_gpu_hour")
    return Series(
        name=name,
        points=tuple(points),
        law="weak" if law == "weak" else "strong",
        price_per_gpu_hour=None if price is None else _from_0(price, where),
        currency=_currency(given.get("currency", ""), where),
        claims=tuple(_claim(one, where) for one in _list(given, "claims", where)),
        notes=tuple(_notes(given, where)),
        **_work(given, unit, where),
    )


def _notes(given: Mapping[str, Any], where: str) -> Iterator[str]:
    yield from (str(one) for one in _list(given, "notes", where))
    if "source" in given:
        yield f"source: {given['source']}"


def _currency(value: object, where: str) -> str:
    if isinstance(value, str) and len(value) < 20 and value.isprintable():
        return value
    message = f"{where}: currency is {str(value)[:40]!r}"
    raise ConfigError(message, hint="write a short word, such as USD, or SU")


def _work(given: Mapping[str, Any], unit: str, where: str) -> dict[str, Any]:
    """Return the fields of a series on the work to which its GPU-hours refer."""
    samples = given.get("samples")
    count = None if samples is None else _from_0(samples, f"{where}, samples")
    if unit == "samples_per_s":
        count = count or float(THOUSAND)
        return {"work": f"{count:,.0f} samples", "work_size": count, "work_samples": count}
    return {"work": str(given.get("work", "the work")), "work_size": 1.0, "work_samples": count}


def _point(point: object, unit: str, where: str) -> Point:
    given = _object(point, _POINT_KEYS, f"{where}, points")
    size = _ranks(given.get("world_size"), where)
    at = f"{where}, world size {size}"
    if "values" in given and "value" in given:
        message = f"{at}: value and values are both there"
        raise ConfigError(message, hint="write one value, or a list of them, one for each repeat")
    values = given.get("values", [given.get("value")])
    if not isinstance(values, list):
        message = f"{at}: values is not a list"
        raise ConfigError(
            message, hint="write one value, or values in brackets, one for each repeat"
        )
    numbers = [float(_checked(value, at)) for value in values]
    if any(number <= 0 for number in numbers):
        message = f"{at}: {min(numbers)} is no {unit}"
        raise ConfigError(message, hint="throughputs and times are above 0")
    price = given.get("price_per_hour")
    scale = _UNITS[unit]
    return Point(
        world_size=size,
        rates=tuple(1 / (number * scale) if scale else number for number in numbers),
        price_per_hour=None if price is None else _from_0(price, at),
    )


def _ranks(value: object, where: str) -> int:
    size = _checked(value, f"{where}, world_size")
    if size != int(size) or size < 1:
        message = f"{where}, world size {size}: that is not a number of ranks"
        raise ConfigError(message, hint="write 1 or more")
    return int(size)


def _claim(claim: object, where: str) -> Claim:
    given = _object(claim, _CLAIM_KEYS, f"{where}, claims")
    quantity = str(given.get("quantity"))
    if quantity not in QUANTITIES:
        message = f"{where}, claims: quantity is {given.get('quantity')!r}"
        raise ConfigError(message, hint=near_miss(quantity, list(QUANTITIES)))
    value = _checked(given.get("value"), f"{where}, claims")
    size = given.get("world_size")
    samples = _checked(given.get("samples", Decimal(THOUSAND)), f"{where}, claims")
    if samples < 1:
        message = f"{where}, claims: {samples} is not a number of samples"
        raise ConfigError(message, hint="write 1 or more")
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)  # the value is finite
    return Claim(
        text=str(given.get("text", f"{quantity} {value}")),
        quantity=quantity,
        value=float(value),
        half=float(Decimal(5).scaleb(exponent - 1)),
        world_size=None if size is None else _ranks(size, f"{where}, claims"),
        samples=int(samples),
    )


def _object(value: object, known: Iterable[str], where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        message = f"{where}: {str(value)[:40]!r} is not an object"
        raise ConfigError(message, hint=_HOW)
    for key in value:
        if key not in known:
            message = f"{where}: unknown key {key!r}"
            raise ConfigError(message, hint=near_miss(key, list(known)))
    return value


def _list(given: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = given.get(key, [])
    if not isinstance(value, list):
        message = f"{where}: {key} is not a list"
        raise ConfigError(message, hint=_HOW)
    return value


TOLERANCE = 0.01
"""Relative deviation from a claim that is allowed in addition to rounding of its last digit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A number of a row that a claim can be about."""

    read: Callable[[Row], float | None]
    words: str
    """Format string, with one place for the number."""
    digits: str = ""
    """Number format of an amount of money within that place; "" for other quantities."""

    def say(self, number: float, currency: str) -> str:
        """Return the number as text for people."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result for one claim, or for two claims that cannot both hold."""

    text: str
    """The claim, or both claims."""
    verdict: str
    """``reproduced``, ``contradicted``, ``contradictory`` (two claims) or ``unknown``."""
    computed: str
    """The computed numbers, in words."""


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
