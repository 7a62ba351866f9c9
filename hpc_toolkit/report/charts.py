"""Charts of a page: lines on two axes, and distributions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.report.axes import Axis, log_span_ticks
from hpc_toolkit.report.figures import (
    COLOURS,
    DIM,
    INK,
    PAGE,
    Figure,
    Panel,
    escaped,
    figure,
    legend,
    shortened,
    text,
    text_width,
)
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.report.figures import Point, Ticks

_LEFT, _RIGHT, _TOP = 64, 24, 48
_HEIGHT, _GAP = 210, 56
_ROW = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through points, in the units of the axes."""

    name: str
    """Its text in the legend; a line without a name is not in the legend."""
    points: Sequence[Point]
    colour: str
    style: str = ""
    """SVG attributes of the line, such as ``DASHED``; a line of width 2 by default."""
    filled: bool = False
    """Whether the area between the line and 0 has a colour."""
    dotted: bool = False
    """Whether each point has a dot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines on the same axes."""

    x: str
    """Name of the horizontal axis, with its unit."""
    y: str
    across: Axis
    up: Axis
    columns: Ticks
    """Values of the horizontal axis and their labels."""
    rows: Ticks
    series: Sequence[Series]


def plots(
    title: str,
    said: str,
    drawn: Sequence[Plot],
    *,
    beside: int = 1,
    left: float = _LEFT,
    height: float = _HEIGHT,
) -> Figure:
    """Draw plots with one legend, ``beside`` of them in a row; ``said`` describes them in words.

    ``left`` is where a plot begins, so that it can be in line with another figure.
    """
    width = (PAGE - left * beside - _RIGHT) / beside
    lines = [line for plot in drawn for line in plot.series if line.name and line.points]
    names = dict.fromkeys((line.colour, line.name, line.style) for line in lines)
    parts, high = legend(names, _TOP, PAGE - 20)
    top, bottom = _TOP + high + 20, 0.0
    for number, plot in enumerate(drawn):
        panel = Panel(
            x=plot.across,
            y=plot.up,
            left=left + number % beside * (width + left),
            top=top + number // beside * (height + _GAP),
            width=width,
            height=height,
        )
        more = max((label.count("\n") for _, label in plot.columns), default=0)
        bottom = max(bottom, panel.top + height + _GAP + 16 * more)
        parts += panel.frame(plot.columns, plot.rows, plot.x, plot.y)
        for line in plot.series:
            if line.filled and line.points:
                floor = [(line.points[0][0], 0.0), (line.points[-1][0], 0.0)]
                parts.append(panel.band(floor, line.points, line.colour))
            parts += [panel.line(line.points, line.colour, line.style)] if line.points else []
            parts += panel.dots(line.points, line.colour) if line.dotted else ()
    return Figure(title, said, figure(title, PAGE, bottom, parts, alternative=said))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A distribution of durations, in seconds."""

    name: str
    spots: tuple[float, ...]
    """The shortest, the quantiles 25 %, 50 %, 75 % and 95 %, and the longest."""
    count: int


def boxes(title: str, said: str, distributions: Sequence[Box]) -> Figure:
    """Draw a box from the first to the third quartile, its median, and a line from 0 to 95 %.

    The dot is the longest duration. The axis is logarithmic.
    """
    wide = max((text_width(box.name) for box in distributions), default=0)
    left = min(max(wide + 16, _LEFT), 280)
    low = max(min(box.spots[0] for box in distributions), 1e-6) / 1.15
    high = max(*(box.spots[-1] for box in distributions), low * 4) * 1.15
    height = _ROW * len(distributions)
    width = PAGE - left - _RIGHT - 60
    x = Axis(low, high, log=True)
    panel = Panel(x=x, y=Axis(0.0, 1.0), left=left, top=48, width=width, height=height)
    parts = [*panel.frame(log_span_ticks(low, high), [], "duration of an attempt")]
    for number, box in enumerate(distributions):
        parts += _box(panel, box, 48 + _ROW * number + _ROW / 2)
    return Figure(title, said, figure(title, PAGE, height + 100, parts, alternative=said))


def _box(panel: Panel, box: Box, y: float) -> Iterator[str]:
    low, p25, median, p75, p95, high = (panel.at(max(spot, 1e-6), 0.0)[0] for spot in box.spots)
    times = [format_duration(spot) for spot in box.spots]
    said = f"{box.name}: {counted(box.count, 'attempt')}, median {times[2]},"
    said += f" 95 % below {times[4]}, longest {times[5]}"
    stroke = 'stroke="currentColor" fill="none"'
    yield f"<g><title>{escaped(said)}</title>"
    yield text(panel.left - 8, y + 4, shortened(box.name, panel.left - 16), anchor="end")
    yield f'<path class="{DIM}" d="M{low:.1f} {y}H{p95:.1f}" {stroke}/>'
    place = f'x="{p25:.1f}" y="{y - 6}" width="{max(p75 - p25, 1):.1f}" height="12"'
    yield f'<rect class="{COLOURS[0]}" {place} fill-opacity="0.55"/>'
    yield f'<path class="{INK}" d="M{median:.1f} {y - 7}v14" {stroke} stroke-width="2"/>'
    yield f'<circle class="{COLOURS[1]}" cx="{high:.1f}" cy="{y}" r="3"/>'
    yield text(PAGE - _RIGHT, y + 4, f"{box.count:,}", anchor="end", colour=DIM)
    yield "</g>"
