"""Draw speed-up and efficiency over world sizes as SVG; equal numbers give equal bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.training.scaling.comparison import Comparison

COLOURS = ("#2a6f97", "#c1440e", "#3a7d44", "#7b4b94", "#b8860b", "#1b998b", "#6c757d", "#5f0f40")
"""Colours of the series in their order, repeated after the last one."""

_WIDTH, _HEIGHT = 360, 260
_LEFT, _TOP, _GAP = 60, 60, 80
_CURVE_POINTS = 40
_FONT = 'font-family="sans-serif" font-size="12"'


@dataclass(frozen=True, slots=True)
class _Axes:
    """Axes of one panel: ranks on a logarithmic horizontal axis, a number on the vertical one."""

    left: float
    most_ranks: float
    least_ranks: float
    low: float
    high: float
    log: bool

    def at(self, ranks: float, value: float) -> tuple[float, float]:
        """Return where to draw a point; a value outside the axes is drawn on their edge."""
        span = math.log(self.most_ranks / self.least_ranks) or 1.0
        across = math.log(ranks / self.least_ranks) / span
        value = min(max(value, self.low), self.high)
        if self.log:
            up = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            up = (value - self.low) / (self.high - self.low)
        return self.left + _WIDTH * across, _TOP + _HEIGHT * (1 - up)


def scaling_svg(comparisons: Sequence[Comparison], minimum: float) -> str:
    """Draw two panels: speed-up with the ideal line, and efficiency with the wanted one.

    Bars are the range over pairs of repeats. A dashed curve is the fitted law, if there are at
    least three world sizes.
    """
    rows = [row for one in comparisons for row in one.rows]
    least = 1.0
    most = max(2.0, *(row.ideal for row in rows))
    # Cut the bars of repeats that differ wildly, or the other points could not be told apart.
    speedups = [max(row.speedup, min(row.high * row.ideal, 2 * most)) for row in rows]
    top = max(most, *speedups)
    speedup = _Axes(
        _LEFT, most, least, 0.7 * min(1.0, *(_low(row.speedup) for row in rows)), top, True
    )
    highest = max(1.1, *(max(row.efficiency, min(row.high, 2.0)) for row in rows))
    share = _Axes(_LEFT + _WIDTH + _GAP, most, least, 0.0, math.ceil(10 * highest) / 10, False)
    height = _TOP + _HEIGHT + 90 + 20 * len(comparisons)
    width = _LEFT + 2 * _WIDTH + _GAP + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {_FONT}>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_frame(speedup, comparisons, "speed-up"),
        *_frame(share, comparisons, "efficiency"),
    ]
    ideal = [speedup.at(least, 1.0), speedup.at(most, most)]
    lines.append(f'<path d="{_path(ideal)}" stroke="#999" stroke-dasharray="2 3"/>')
    wanted = [share.at(least, minimum), share.at(most, minimum)]
    lines.append(f'<path d="{_path(wanted)}" stroke="#999" stroke-dasharray="2 3"/>')
    for number, one in enumerate(comparisons):
        colour = COLOURS[number % len(COLOURS)]
        lines += _series(speedup, share, one, colour)
        y = _TOP + _HEIGHT + 82 + 20 * number
        lines.append(f'<path d="M{_LEFT} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{_LEFT + 32}" y="{y}">{escape(_legend(one))}</text>')
    words = f"dotted: ideal, and the wanted {minimum:.0%}; dashed: the fitted law"
    where = f'x="{share.left + _WIDTH}" y="{_TOP + _HEIGHT + 62}" text-anchor="end" fill="#666"'
    lines.append(f"<text {where}>{words}</text>")
    return "\n".join([*lines, "</svg>", ""])


def _low(value: float) -> float:
    return max(value, 0.01)


def _legend(one: Comparison) -> str:
    serial = one.serial
    if serial is None or serial.low is None:
        return one.series.name
    interval = f"{serial.low:.1%} to {serial.high:.1%}"
    return f"{one.series.name}; {serial.name}: {serial.share:.1%} serial ({interval})"


def _frame(axes: _Axes, comparisons: Sequence[Comparison], name: str) -> Iterator[str]:
    bottom = _TOP + _HEIGHT
    yield f'<text x="{axes.left}" y="{_TOP - 18}" font-size="15">{name}</text>'
    for value in _ticks(axes):
        _, y = axes.at(axes.least_ranks, value)
        text = f"{value:g}" if axes.log else f"{value:.0%}"
        yield f'<path d="M{axes.left} {y:.1f}h{_WIDTH}" stroke="#ddd"/>'
        yield f'<text x="{axes.left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    bases = {one.rows[0].world_size for one in comparisons}
    unit = bases.pop() if len(bases) == 1 else None
    for ideal in sorted({row.ideal for one in comparisons for row in one.rows}):
        x, _ = axes.at(ideal, axes.low)
        text = f"{ideal * unit:g}" if unit else f"{ideal:g}"
        yield f'<path d="M{x:.1f} {_TOP}V{bottom}" stroke="#eee"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
    words = "ranks" if unit else "ranks, as a multiple of each smallest world size"
    middle = axes.left + _WIDTH / 2
    yield f'<text x="{middle}" y="{bottom + 36}" text-anchor="middle">{words}</text>'


def _ticks(axes: _Axes) -> list[float]:
    if axes.log:
        low, high = math.ceil(math.log2(axes.low)), math.floor(math.log2(axes.high))
        return [2.0**power for power in range(low, high + 1)]
    step = 0.2 * math.ceil(axes.high / 2.2)
    return [step * number for number in range(int(axes.high / step + 1e-9) + 1)]


def _series(speedup: _Axes, share: _Axes, one: Comparison, colour: str) -> Iterator[str]:
    for axes, factor in ((speedup, True), (share, False)):
        points = [axes.at(row.ideal, row.speedup if factor else row.efficiency) for row in one.rows]
        yield f'<path d="{_path(points)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for row, (x, y) in zip(one.rows, points, strict=True):
            scale = row.ideal if factor else 1.0
            _, upper = axes.at(row.ideal, row.high * scale)
            _, lower = axes.at(row.ideal, row.low * scale)
            if row.repeats > 1:
                yield f'<path d="M{x:.1f} {upper:.1f}V{lower:.1f}" stroke="{colour}"/>'
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'
        curve = list(_law(axes, one, speedup=factor))
        if curve:
            dash = 'stroke-dasharray="6 4" stroke-opacity="0.6"'
            yield f'<path d="{_path(curve)}" fill="none" stroke="{colour}" {dash}/>'


def _law(axes: _Axes, one: Comparison, *, speedup: bool) -> Iterator[tuple[float, float]]:
    serial = one.serial
    if serial is None or serial.low is None:
        return
    base, last = one.rows[0].world_size, one.rows[-1].ideal
    for step in range(_CURVE_POINTS + 1):
        ideal = last ** (step / _CURVE_POINTS)
        read = serial.speedup if speedup else serial.efficiency
        yield axes.at(ideal, read(base * ideal, base))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
