"""Validation of the options of a rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeGuard

from hpc_toolkit.bandit.policy import LARGEST_NUMBER
from hpc_toolkit.errors import ConfigError, near_miss

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_number(
    rule: str, option: str, value: object, *, low: float, high: float = math.inf, hint: str
) -> None:
    """Raise ConfigError unless ``value`` is a finite number from ``low`` to ``high``."""
    # Comparisons reject NaN too; math.isfinite would raise OverflowError for huge integers.
    if not _is_number(value) or not low <= value <= min(high, LARGEST_NUMBER):
        message = f"{rule}: {option} is {value!r}"
        raise ConfigError(message, hint=hint)


def checked_count(rule: str, option: str, value: object, *, low: int, hint: str) -> int:
    """Return the value as an integer; 5.0 is accepted as 5.

    Raises ConfigError unless it is a whole number of at least ``low``.
    """
    if not _is_number(value) or not low <= value < math.inf or value % 1:
        message = f"{rule}: {option} is {value!r}"
        raise ConfigError(message, hint=hint)
    return int(value)


def check_word(rule: str, option: str, value: object, known: Sequence[str]) -> None:
    """Raise ConfigError unless ``value`` is one of ``known``."""
    if value not in known:
        message = f"{rule}: {option} is {value!r}"
        raise ConfigError(message, hint=near_miss(str(value), list(known)))


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
