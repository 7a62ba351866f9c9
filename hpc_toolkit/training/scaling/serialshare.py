"""The share of the work that more ranks do not shorten, by Amdahl's or Gustafson's law.

Both laws are linear. Amdahl (1967): a fixed amount of work takes the time a + b / n on n ranks.
Gustafson (1988): n ranks with work of their own do a + b n in a given time. The serial share is
a / (a + b) in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.training.scaling.series import Law, Series

# Student's t, 97.5 %, by degrees of freedom from 1 (Abramowitz and Stegun 1964, table 26.10).
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
_NORMAL = 1.960


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialShare:
    """A fitted law and its uncertainty."""

    law: Law
    """``strong`` is Amdahl's, ``weak`` is Gustafson's."""
    share: float
    """The serial share, 0 to 1."""
    raw: float
    """The share before clipping to 0 to 1; below 0 the speed-up was more than proportional."""
    low: float | None
    """Lower end of the 95 % interval; None with two world sizes: any two points are on a line."""
    high: float | None
    points: int
    """Number of world sizes that were fitted."""
    worst: float
    """The largest deviation of a point from the line, as a share of the point."""

    @property
    def name(self) -> str:
        """The name of the law."""
        return "Amdahl" if self.law == "strong" else "Gustafson"

    def speedup(self, world_size: float, base: float = 1) -> float:
        """Return the rate of ``world_size`` ranks divided by the rate of ``base`` ranks."""
        return self._rate(world_size) / self._rate(base)

    def efficiency(self, world_size: float, base: float = 1) -> float:
        """Return the speed-up as a share of the ideal one."""
        return self.speedup(world_size, base) * base / world_size

    def _rate(self, world_size: float) -> float:
        if self.law == "strong":
            return 1 / (self.share + (1 - self.share) / world_size)
        return self.share + (1 - self.share) * world_size

    def largest(self, efficiency: float, base: float = 1) -> float:
        """Return the world size at which the efficiency falls to this value; infinite if never."""
        # Convert the efficiency relative to ``base`` ranks to one relative to a single rank.
        goal = efficiency * self.efficiency(base)
        if self.law == "strong":
            return math.inf if self.share == 0 else (1 / goal - (1 - self.share)) / self.share
        return math.inf if goal <= 1 - self.share else self.share / (goal - (1 - self.share))

    def largest_between(self, efficiency: float, base: float = 1) -> tuple[float, float]:
        """Return `largest` for both ends of the interval, the smaller world size first."""
        ends = [self.share if end is None else end for end in (self.high, self.low)]
        least, most = (replace(self, share=end).largest(efficiency, base) for end in ends)
        return least, most


def fit(series: Series) -> SerialShare | None:
    """Fit the serial share of a series; return None with one world size.

    The fit is least squares on relative errors, over the medians of the world sizes: repeats on
    one machine are too similar to count as separate points. The interval uses Student's t, with the
    number of world sizes minus two as degrees of freedom, so it is wide for three points.
    """
    if len(series.points) < 2:
        return None
    if series.law == "strong":
        xs = [1 / point.world_size for point in series.points]
        ys = [1 / point.rate for point in series.points]
    else:
        xs = [float(point.world_size) for point in series.points]
        ys = [point.rate for point in series.points]
    # The share does not depend on the unit of the rates, but tiny numbers would add to its errors.
    ys = [y / ys[0] for y in ys]
    a, b, covariance = _line(xs, ys)
    raw = a / (a + b) if a + b > 0 else 1.0
    share = min(max(raw, 0.0), 1.0)
    low = high = None
    if covariance is not None:
        half = _half_width(a, b, covariance, len(xs) - 2)
        low, high = max(0.0, raw - half), min(1.0, raw + half)
        low, high = min(low, share), max(high, share)
    return SerialShare(
        law=series.law,
        share=share,
        raw=raw,
        low=low,
        high=high,
        points=len(xs),
        worst=max(abs(a + b * x - y) / y for x, y in zip(xs, ys, strict=True)),
    )


def _line(
    xs: Sequence[float], ys: Sequence[float]
) -> tuple[float, float, tuple[float, float, float] | None]:
    """Return offset and slope with the least relative errors, and their (aa, ab, bb) covariance."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    x_mean = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    y_mean = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x in zip(weights, xs, strict=True))
    along = zip(weights, xs, ys, strict=True)
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, x, y in along) / spread
    offset = y_mean - slope * x_mean
    free = len(xs) - 2
    if not free:
        return offset, slope, None
    errors = sum(((offset + slope * x - y) / y) ** 2 for x, y in zip(xs, ys, strict=True))
    unit = errors / free
    slope_variance = unit / spread
    covariance = (
        unit / total + x_mean**2 * slope_variance,
        -x_mean * slope_variance,
        slope_variance,
    )
    return offset, slope, covariance


def _half_width(a: float, b: float, covariance: tuple[float, float, float], free: int) -> float:
    """Return half of the 95 % interval of a / (a + b), to first order in the errors of a and b."""
    aa, ab, bb = covariance
    of_a, of_b = b / (a + b) ** 2, -a / (a + b) ** 2
    variance = of_a**2 * aa + 2 * of_a * of_b * ab + of_b**2 * bb
    student = _STUDENT[free - 1] if free <= len(_STUDENT) else _NORMAL
    return student * math.sqrt(max(0.0, variance))
