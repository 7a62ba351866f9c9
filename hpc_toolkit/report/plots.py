"""Draw lines on two number axes, and values with their errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.report.axes import Axis, number_label, range_ticks, span_ticks
from hpc_toolkit.report.charts import PAGE
from hpc_toolkit.report.figures import (
    COLOURS,
    DASHED,
    DIM,
    DOTTED,
    GRID,
    Panel,
    escaped,
    figure,
    shortened,
    text,
    text_width,
)
from hpc_toolkit.system.quantities import HOUR_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.report.figures import Point

LINE, STEPS, DASHES, DOTS_LINE, DOTS = "line", "steps", "dashes", "dotted", "dots"
_STYLES = {
    LINE: 'stroke-width="2"',
    STEPS: 'stroke-width="2"',
    DASHES: f'stroke-width="2" {DASHED}'.replace(' stroke-opacity="0.6"', ""),
    DOTS_LINE: f'stroke-width="2" {DOTTED}',
}
_LEFT, _TOP, _HEIGHT, _GAP = 64, 92, 210, 72
_ROW = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, or dots."""

    name: str
    points: Sequence[Point]
    colour: str
    style: str = LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Series on the same axes."""

    x: str
    """What the horizontal axis shows, with its unit."""
    y: str
    series: Sequence[Series]
    spans: bool = False
    """Whether x is a duration in seconds."""
    price: tuple[float, str] | None = None
    """Price of an hour, which is written below each duration, and its currency."""


def plots(title: str, drawn: Sequence[Plot], *, alternative: str) -> str:
    """Draw two plots side by side, or one over the full width, with one legend."""
    width = (PAGE - _LEFT * len(drawn) - 24) / len(drawn)
    names = {one.name: one for plot in drawn for one in plot.series if one.points}
    parts = [*_legend(list(names.values()))]
    for number, plot in enumerate(drawn):
        parts += _plot(plot, _LEFT + number * (width + _LEFT), width)
    height = _TOP + _HEIGHT + (72 if any(one.price for one in drawn) else 56)
    return figure(title, PAGE, height, parts, alternative=alternative)


def _plot(plot: Plot, left: float, width: float) -> Iterator[str]:
    points = [point for one in plot.series for point in one.points]
    ys = [y for _, y in points] or [0.0]
    x, y = Axis(0.0, max((x for x, _ in points), default=0.0) or 1.0), padded(min(ys), max(ys))
    columns = span_ticks(x.high, 6) if plot.spans else range_ticks(x.low, x.high)
    if plot.spans and plot.price is not None:
        price, currency = plot.price
        costs = (number_label(at / HOUR_S * price) for at, _ in columns)
        columns = [
            (at, f"{label}\n{cost} {currency}")
            for (at, label), cost in zip(columns, costs, strict=True)
        ]
    panel = Panel(x=x, y=y, left=left, top=_TOP, width=width, height=_HEIGHT)
    yield from panel.frame(columns, range_ticks(y.low, y.high), plot.x, plot.y)
    for one in plot.series:
        if one.points:
            known = stepped(one.points) if one.style == STEPS else one.points
            yield panel.line(known, one.colour, _STYLES[one.style])


def padded(low: float, high: float) -> Axis:
    """An axis with a little room at both ends."""
    room = max((high - low) * 0.06, abs(high) * 1e-6)
    room = abs(high) * 0.05 or 1.0 if high == low else room
    return Axis(low - room, high + room)


def stepped(points: Sequence[Point]) -> list[Point]:
    """Hold each value until the next point."""
    found: list[Point] = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found


def _legend(series: Sequence[Series]) -> Iterator[str]:
    left = 10.0
    for one in series:
        if one.style == DOTS:
            yield f'<circle class="{one.colour}" cx="{left + 10}" cy="44" r="3"/>'
        else:
            line = f'd="M{left:.1f} 44h22" stroke="currentColor" {_STYLES[one.style]}'
            yield f'<path class="{one.colour}" {line}/>'
        yield text(left + 28, 48, one.name)
        left += 28 + text_width(one.name) + 16


def with_error(value: float, error: float | None) -> str:
    """A value with its error in words."""
    return f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else "")


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with an error."""

    value: float
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A row of a plot of intervals: one interval, or none, for each of its names."""

    name: str
    intervals: Sequence[Interval | None]
    said: str


def intervals(
    title: str,
    groups: Sequence[tuple[str, Sequence[Estimate]]],
    names: Sequence[str],
    *,
    x: str,
    alternative: str,
) -> str:
    """Draw a row of values with their errors for each estimate, in groups on one axis."""
    rows = [one for _, some in groups for one in some]
    known = [one for row in rows for one in row.intervals if one is not None]
    ends = [one.value + side * (one.error or 0.0) for one in known for side in (-1, 1)]
    names_of = [*(row.name for row in rows), *(name for name, _ in groups)]
    wide = max(map(text_width, names_of), default=0.0)
    left = min(max(wide + 20, _LEFT), 340.0)
    heads = sum(1 for name, _ in groups if name)
    height = _ROW * (len(rows) + heads) + 6
    axis = padded(min(ends, default=0.0), max(ends, default=1.0))
    top = 64 if len(names) > 1 else 40
    panel = Panel(x=axis, y=Axis(0, 1), left=left, top=top, width=PAGE - left - 24, height=height)
    parts = [*panel.frame(range_ticks(axis.low, axis.high), [], x)]
    if len(names) > 1:
        kinds = [
            Series(name=name, points=(), colour=COLOURS[number], style=DOTS)
            for number, name in enumerate(names)
        ]
        parts += _legend(kinds)
    y = top + 4.0
    for name, some in groups:
        if name:
            parts.append(text(left - 10, y + 13, shortened(name, left - 16), anchor="end"))
            parts.append(
                f'<path class="{GRID}" d="M10 {y:.1f}H{PAGE - 24}" stroke="currentColor"/>'
            )
            y += _ROW
        for one in some:
            parts += _estimate(panel, one, y + _ROW / 2)
            y += _ROW
    return figure(title, PAGE, top + height + 48, parts, alternative=alternative)


def _estimate(panel: Panel, row: Estimate, y: float) -> Iterator[str]:
    yield f"<g><title>{escaped(row.said)}</title>"
    name = shortened(row.name, panel.left - 20)
    yield text(panel.left - 10, y + 4, name, anchor="end", colour=DIM)
    known = [(number, one) for number, one in enumerate(row.intervals) if one is not None]
    for line_number, (number, one) in enumerate(known):
        shift = 7 * (line_number - (len(known) - 1) / 2)
        spots = (one.value, one.value - (one.error or 0.0), one.value + (one.error or 0.0))
        middle, low, high = (panel.at(spot, 0.0)[0] for spot in spots)
        line = f'd="M{low:.1f} {y + shift:.1f}H{high:.1f}" stroke="currentColor" stroke-width="2"'
        yield f'<path class="{COLOURS[number]}" {line}/>'
        place = f'cx="{middle:.1f}" cy="{y + shift:.1f}" r="3.2"'
        yield f'<circle class="{COLOURS[number]}" {place}/>'
    yield "</g>"
