"""Convert a TOML table into the fields of a dataclass: one converter per key; errors name the key.

A converter takes the value and its source ("clusters/lab.toml: nodes") and raises ConfigError.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.quantities import HOUR_S, parse_duration, parse_size_mib

Key = tuple[str, Callable[[Any, str], Any]]
"""The field that a key sets, and the converter of the value."""

MAX_COUNT = 2**20
"""Far above any count of cluster hardware; a larger number is a mistake."""

_SHOWN_CHARS = 200

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def convert(table: dict[str, Any], keys: dict[str, Key], file: str) -> dict[str, Any]:
    """Convert the values of ``table``; return the fields that it sets. Errors name ``file``.

    An unknown key raises a ConfigError that suggests the closest known key: a typo must not
    silently select a default.
    """
    for key in table:
        if key not in keys:
            raise ConfigError(f"{file}: unknown key {key!r}", hint=near_miss(key, list(keys)))
    return {
        field: convert(table[key], f"{file}: {key}")
        for key, (field, convert) in keys.items()
        if key in table
    }


def wrong(where: str, value: object, wanted: str) -> ConfigError:
    try:
        shown = repr(value)
    except ValueError:
        # Python refuses to print an integer of more than 4,300 digits.
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return ConfigError(f"{where}: {shown} is not {wanted}", hint=f"write {wanted}")


def kept(is_good: Callable[[Any], bool], wanted: str) -> Callable[[Any, str], Any]:
    """A converter that keeps the values that are ``wanted``, as messages call them."""

    def keep(value: Any, where: str) -> Any:
        if is_good(value):
            return value
        raise wrong(where, value, wanted)

    return keep


def number_from(
    low: float, high: float, wanted: str, *, whole: bool = False
) -> Callable[[Any, str], Any]:
    """A converter for a number of this range, which ``wanted`` describes to users."""
    # type() instead of isinstance(), which would accept true as a number.
    kinds = (int,) if whole else (int, float)
    return kept(lambda value: type(value) in kinds and low <= value <= high, wanted)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


Texts = Callable[[Any, str], str]

text: Texts = kept(_is_line, "one line of text")
word: Texts = kept(
    lambda value: isinstance(value, str) and bool(_WORD.fullmatch(value)),
    "a name of letters, digits, '_', '.' and '-'",
)
"""A short name that is safe in a path, an option and a shell."""
path: Texts = kept(lambda value: _is_line(value) and value.startswith("/"), "an absolute path")
flag: Callable[[Any, str], bool] = kept(lambda one: isinstance(one, bool), "true or false")
count: Callable[[Any, str], int] = number_from(
    1, MAX_COUNT, f"a whole number from 1 to {MAX_COUNT}", whole=True
)
count_or_zero: Callable[[Any, str], int] = number_from(
    0, MAX_COUNT, f"a whole number from 0 to {MAX_COUNT}", whole=True
)


def date(value: object, where: str) -> str:
    if type(value) is dt.date:
        return value.isoformat()
    raise wrong(where, value, "a date such as 2026-01-31, without quotes")


def mem(value: object, where: str) -> int:
    """A memory size, in MiB."""
    return parse_size_mib(text(value, where), where=where)


def walltime(value: object, where: str) -> int:
    """A time limit, in whole seconds."""
    return math.ceil(parse_duration(text(value, where), where=where))


def duration_s(value: object, where: str) -> float:
    """Text such as "90s" or "10min", or a positive number of seconds for a key that says so."""
    return _duration(value, 1, 1e30, "seconds", where)


def duration_h(value: object, where: str) -> float:
    """Text such as "90min" or "4h", or a positive number of hours for a key that says so."""
    return _duration(value, HOUR_S, 1e6, "hours", where)


def _duration(value: object, unit_s: int, most: float, units: str, where: str) -> float:
    if isinstance(value, str):
        return parse_duration(value, where=where) / unit_s
    if isinstance(value, int | float) and not isinstance(value, bool) and 1e-9 <= value <= most:
        return value
    raise wrong(where, value, f"a positive number of {units}, or a duration such as '90min'")


def texts(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, list):
        return tuple(text(entry, where) for entry in value)
    raise wrong(where, value, "a list of texts")


def pairs(value: object, where: str) -> tuple[tuple[str, str], ...]:
    """A table of printable lines, in the order of the file."""
    if isinstance(value, dict):
        return tuple(
            (text(key, where), text(entry, f"{where}.{key}")) for key, entry in value.items()
        )
    raise wrong(where, value, "a table of texts")


@dataclass(frozen=True, slots=True)
class Choice:
    """A converter for one of a few words."""

    choices: tuple[str, ...]
    """The words."""

    def __call__(self, value: object, where: str) -> str:
        if isinstance(value, str) and value in self.choices:
            return value
        raise wrong(where, value, f"one of {', '.join(self.choices)}")
