"""Features of arms: the values of a table of settings as numbers that a policy can compare."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LINEAR, LOG, CATEGORIES, NONE = "linear", "log", "categories", "none"
KINDS = (LINEAR, LOG, CATEGORIES, NONE)
"""How the values of a key can become features; or a list of its values, in their order."""

MOST_CATEGORIES = 12
"""Texts with more different values are names and not categories, unless the campaign says so."""

Kind = str | tuple[Any, ...]


class Numbers(NamedTuple):
    """One feature."""

    name: str
    values: tuple[float, ...]
    """One number for each arm; NaN if it is unknown."""


@dataclass(frozen=True, slots=True)
class Column:
    """The features from one key of the arms."""

    key: str
    kind: Kind
    given: bool
    """Whether the campaign says so, rather than the values."""
    numbers: tuple[Numbers, ...]
    """The features: several for categories, none if the key is not used."""


def columns_of(rows: Sequence[Mapping[str, Any]], given: Mapping[str, Kind]) -> list[Column]:
    """The features of each key, in the order in which the keys first occur.

    Raises ConfigError: ``given`` does not fit the values of a key, or there is no such key.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in given:
        if key not in keys:
            message = f"features: no arm has the key {key!r}"
            raise ConfigError(message, hint=near_miss(key, keys))
    found = []
    for key in keys:
        values = [row.get(key) for row in rows]
        kind = given[key] if key in given else kind_of(values)
        numbers = tuple(_numbers(key, values, kind))
        found.append(Column(key, kind, key in given, numbers))
    return found


def kind_of(values: Iterable[Any]) -> str:
    """How values become features, if nobody says so; a key with one value does not become any.

    Positive numbers whose logarithms are more evenly spaced than they are themselves become
    logarithms, such as 0.001, 0.01, 0.1 or 16, 32, 64.
    """
    known = {_text(value): value for value in values if value is not None}
    if len(known) < 2:
        return NONE
    if not all(isinstance(value, int | float) for value in known.values()):
        return CATEGORIES if len(known) <= MOST_CATEGORIES else NONE
    numbers = sorted(set(map(float, known.values())))
    if len(numbers) < 2:
        return NONE
    if numbers[0] <= 0 or len(numbers) < 3:
        return LINEAR
    if len(set(map(math.log, numbers))) < len(numbers):
        return LINEAR
    return LOG if _unevenness(list(map(math.log, numbers))) < _unevenness(numbers) else LINEAR


def _unevenness(ascending: list[float]) -> float:
    """The variance of the gaps relative to their mean, rounded: gaps of 0.1 are not exact."""
    gaps = [after - before for before, after in pairwise(ascending)]
    mean = math.fsum(gaps) / len(gaps)
    return round(math.fsum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps), 6)


def _numbers(key: str, values: Sequence[Any], kind: Kind) -> Iterable[Numbers]:
    if kind == NONE:
        return
    if isinstance(kind, str) and kind != CATEGORIES:
        yield Numbers(key, tuple(_number(key, value, kind) for value in values))
        return
    texts = [None if value is None else _text(value) for value in values]
    if isinstance(kind, str):
        for category in sorted({text for text in texts if text is not None}):
            yield Numbers(f"{key}={category}", tuple(float(text == category) for text in texts))
        return
    order = {_text(value): float(place) for place, value in enumerate(kind)}
    for text in texts:
        if text is not None and text not in order:
            message = f"features.{key}: the value {text} is not in the list"
            raise ConfigError(message, hint="list every value of the key, in order")
    yield Numbers(key, tuple(math.nan if text is None else order[text] for text in texts))


def _number(key: str, value: Any, kind: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        message = f"features.{key}: the value {_text(value)[:80]} is not a number"
        raise ConfigError(message, hint='write "categories", "none" or a list of the values')
    if kind == LINEAR:
        return float(value)
    if value <= 0:
        message = f"features.{key}: the value {value} has no logarithm"
        raise ConfigError(message, hint='write "linear"')
    return math.log(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
