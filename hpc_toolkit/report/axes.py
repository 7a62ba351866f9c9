"""Ranges of axes, and the values that are marked on them with labels that fit."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hpc_toolkit.system.quantities import DAY_S, HOUR_S, MINUTE_S

Tick = tuple[float, str]
"""A value and its label."""

_UNITS = ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_STEPS_S = (
    *(1, 2, 5, 10, 15, 30, MINUTE_S, 2 * MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, 15 * MINUTE_S),
    *(30 * MINUTE_S, HOUR_S, 2 * HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S),
    *(7 * DAY_S, 14 * DAY_S, 30 * DAY_S, 90 * DAY_S, 365 * DAY_S),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of one axis; both ends of a logarithmic one are above 0."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1; a value outside it is at its end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high > low else 0.0


def span_label(seconds: float) -> str:
    """A round duration in one unit: ``30 min``, ``1.5 h``."""
    for factor, unit in _UNITS:
        if seconds >= factor * (1 - 1e-9):
            return f"{seconds / factor:.3g} {unit}"
    return "0"


def number_label(value: float) -> str:
    """A number without an exponent where it fits: ``20,000``, ``2M``, ``0.05``."""
    for factor, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def number_ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[Tick]:
    """Round numbers from ``low`` to ``high``, at most about ``most``; ``whole``: no fractions."""
    step = max(_round_step(high - low, most), 1.0 if whole else 0.0)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [
        (number * step, number_label(round(number * step, 12))) for number in range(first, last + 1)
    ]


def span_ticks(high_s: float, most: int = 8) -> list[Tick]:
    """Round durations from 0 to ``high_s``."""
    if high_s < most:
        step = _round_step(high_s, most)
    else:
        step = next((step for step in _STEPS_S if high_s / step <= most), _round_step(high_s, most))
    unit_s, unit = next((one for one in _UNITS if step >= one[0] * (1 - 1e-9)), _UNITS[-1])
    values = [number * step for number in range(int(high_s / step + 1e-9) + 1)]
    return [(value, f"{value / unit_s:.4g} {unit}" if value else "0") for value in values]


def log_span_ticks(low_s: float, high_s: float, most: int = 8) -> list[Tick]:
    """Durations on a logarithmic axis: parts of a second by decades, then usual times."""
    known = [10.0**power for power in range(-6, 1)]
    if high_s / low_s < 100:  # about two decades
        known = [factor * value for value in known for factor in (1, 2, 5)]
    known += [*(2, 5, 10, 20, 30), *(k * MINUTE_S for k in (1, 2, 5, 10, 20, 30))]
    known += [*(k * HOUR_S for k in (1, 3, 6, 12)), *(k * DAY_S for k in (1, 3, 7, 30, 100, 1000))]
    inside = sorted({value for value in known if low_s <= value <= high_s})
    if len(inside) < 2:
        inside = [low_s, high_s]
    thin = -(-len(inside) // most)
    return [(value, span_label(float(f"{value:.2g}"))) for value in inside[::thin]]


def moment(at: float, *, zone: bool = True) -> str:
    """Local date and time; "unknown" for a number that is not a time."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S" + " %Z" * zone, time.localtime(at))
    except (OverflowError, OSError, ValueError):
        return "unknown"


def _round_step(high: float, most: int) -> float:
    if high <= 0 or not math.isfinite(high):
        return 1.0
    power = 10.0 ** math.floor(math.log10(high / most))
    return next(factor * power for factor in (1, 2, 5, 10) if high / (factor * power) <= most)
