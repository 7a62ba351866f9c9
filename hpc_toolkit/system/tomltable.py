"""Convert a TOML table into the fields of a dataclass: one converter per key; errors name the key.

A converter takes the value and its source ("clusters/lab.toml: nodes") and raises ConfigError.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.quantities import HOUR_S, parse_duration, parse_size_mib

if TYPE_CHECKING:
    from collections.abc import Callable

Key = tuple[str, "Callable[[Any, str], Any]"]
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
            msg = f"{file}: unknown key {key!r}"
            raise ConfigError(msg, hint=near_miss(key, list(keys)))
    return {
        field: convert(table[key], f"{file}: {key}")
        for key, (field, convert) in keys.items()
        if key in table
    }


def wrong(where: str, value: object, wanted: str) -> ConfigError:
    """The error for a value that is not ``wanted``."""
    try:
        shown = repr(value)
    except ValueError:
        # Python refuses to print an integer of more than 4,300 digits.
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}..."
    return ConfigError(f"{where}: {shown} is not {wanted}", hint=f"write {wanted}")


def text(value: object, where: str) -> str:
    """One printable line."""
    if isinstance(value, str) and value.isprintable():
        return value
    raise wrong(where, value, "one line of text")


def word(value: object, where: str) -> str:
    """A short name that is safe in a path, an option and a shell."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    raise wrong(where, value, "a name of letters, digits, '_', '.' and '-'")


def path(value: object, where: str) -> str:
    """An absolute path on one line."""
    if isinstance(value, str) and value.isprintable() and value.startswith("/"):
        return value
    raise wrong(where, value, "an absolute path")


def date(value: object, where: str) -> str:
    """A TOML date, as ISO 8601 text."""
    if type(value) is dt.date:
        return value.isoformat()
    raise wrong(where, value, "a date such as 2026-01-31, without quotes")


def flag(value: object, where: str) -> bool:
    """A boolean."""
    if isinstance(value, bool):
        return value
    raise wrong(where, value, "true or false")


def count(value: object, where: str) -> int:
    """A whole number from 1 to MAX_COUNT."""
    return _number(value, 1, where)


def count_or_zero(value: object, where: str) -> int:
    """A whole number from 0 to MAX_COUNT."""
    return _number(value, 0, where)


def _number(value: object, lowest: int, where: str) -> int:
    # type() instead of isinstance(), which would accept true as a count.
    if type(value) is int and lowest <= value <= MAX_COUNT:
        return value
    raise wrong(where, value, f"a whole number from {lowest} to {MAX_COUNT}")


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
    """A list of printable lines."""
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
