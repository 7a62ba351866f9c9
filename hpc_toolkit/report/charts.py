"""Charts of a report: curves over time, bars that add up, and distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from hpc_toolkit.report.axes import (
    Axis,
    log_span_ticks,
    number_ticks,
    span_ticks,
    whole_ticks,
)
from hpc_toolkit.report.figures import (
    COLOURS,
    DIM,
    INK,
    Panel,
    escaped,
    figure,
    keys,
    shortened,
    text,
    text_width,
)
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PAGE = 860
"""Width of a figure of a page."""
_PHONE = 320
"""Width that a legend may take where a picture has to fit a phone."""
_LEFT, _RIGHT, _TOP = 70, 24, 64
_CURVE, _GAP = 120, 56
_ROW = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of intervals of equal length."""

    name: str
    """What they are, with the unit."""
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    """Lower edge of a band around the values."""
    high: Sequence[float | None] = ()
    most: float = 0.0
    """The end of the axis at least, such as 100 for a percentage."""
    width_s: float = 0.0
    """Length of an interval; 0: the intervals cover the whole time."""
    whole: bool = False
    """Whether only whole numbers are marked on its axis."""


def over_time(
    title: str, span_s: float, curves: Sequence[Curve], *, alternative: str, left: float = _LEFT
) -> str:
    """Draw each curve in a panel of its own, below each other on one axis of time.

    ``left`` is where the panels begin, so that they can be in line with another figure.
    """
    parts: list[str] = []
    width = PAGE - left - _RIGHT
    for number, curve in enumerate(curves):
        known = [one for one in (*curve.values, *curve.high) if one is not None]
        top = max(curve.most, *known, 0.0) or 1.0
        panel = Panel(
            x=Axis(0.0, span_s or 1.0),
            y=Axis(0.0, top * (1 if curve.most >= top else 1.05)),
            left=left,
            top=_TOP + number * (_CURVE + _GAP),
            width=width,
            height=_CURVE,
        )
        ticks = whole_ticks(top, 4) if curve.whole else number_ticks(top, 4)
        last = number == len(curves) - 1
        columns = span_ticks(span_s or 1.0)
        shown = columns if last else [(at, "") for at, _ in columns]
        name = "time since the first worker started" if last else ""
        parts += panel.frame(shown, ticks, name, curve.name)
        parts += _steps(panel, curve, COLOURS[number % len(COLOURS)], span_s or 1.0)
    height = _TOP + len(curves) * (_CURVE + _GAP)
    return figure(title, PAGE, height, parts, alternative=alternative)


def _steps(panel: Panel, curve: Curve, colour: str, span_s: float) -> Iterator[str]:
    """Draw an interval as a step; an interval without a value is a gap."""
    width_s = curve.width_s or span_s / max(1, len(curve.values))
    for first, last in _known(curve.values):
        points, lower, upper = [], [], []
        for number in range(first, last):
            for x in (number * width_s, (number + 1) * width_s):
                points.append((x, curve.values[number] or 0.0))
                if curve.high:
                    lower.append((x, curve.low[number] or 0.0))
                    upper.append((x, curve.high[number] or 0.0))
        floor = [(points[0][0], 0.0), (points[-1][0], 0.0)]
        yield panel.band(lower or floor, upper or points, colour)
        yield panel.line(points, colour, 'stroke-width="1.5"')


def _known(values: Sequence[float | None]) -> Iterator[tuple[int, int]]:
    """The ranges of intervals that have values."""
    first = None
    for number, value in enumerate((*values, None)):
        if value is not None and first is None:
            first = number
        elif value is None and first is not None:
            yield first, number
            first = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a whole."""

    name: str
    value: float
    label: str
    """The value as people read it."""
    colour: str


def shares(title: str, wholes: Sequence[tuple[str, Sequence[Part]]], *, alternative: str) -> str:
    """Draw each whole as one bar that is divided into its parts, with a legend of all parts.

    The bars take the width that the page has, and the rest fits a phone.
    """
    parts: list[str] = []
    top = 40
    for name, some in wholes:
        if name:
            parts.append(text(10, top + 11, shortened(name, _PHONE)))
            top += 18
        parts += _bar(some, top)
        top += 36
    for row in _legend_rows([part for _, parts in wholes for part in parts if part.value > 0]):
        parts += keys(10, top + 10, row)
        top += 20
    return figure(title, PAGE, top + 4, parts, alternative=alternative, fluid=True)


def _bar(parts: Sequence[Part], y: float) -> Iterator[str]:
    total = sum(part.value for part in parts) or 1.0
    edges = [0.0, *accumulate(part.value / total * 98 for part in parts)]
    for part, (begin, end) in zip(parts, pairwise(edges), strict=True):
        if part.value > 0:
            wide = max(end - begin - 0.12, 0.12)  # a part above zero is never hidden
            said = escaped(f"{part.name}: {part.label} ({part.value / total:.1%})")
            box = f'x="{1 + begin:.2f}%" y="{y}" width="{wide:.2f}%" height="24"'
            yield f'<rect class="{part.colour}" {box}><title>{said}</title></rect>'


def _legend_rows(parts: Sequence[Part]) -> list[list[tuple[str, str]]]:
    rows: list[list[tuple[str, str]]] = [[]]
    used = 0.0
    for name, colour in {part.name: part.colour for part in parts}.items():
        need = 33 + text_width(name)
        if rows[-1] and used + need > _PHONE:
            rows.append([])
            used = 0.0
        rows[-1].append((colour, name))
        used += need
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A distribution of durations, in seconds."""

    name: str
    low_s: float
    """Shortest."""
    p25_s: float
    median_s: float
    p75_s: float
    p95_s: float
    high_s: float
    """Longest."""
    count: int


def boxes(title: str, distributions: Sequence[Box], *, alternative: str) -> str:
    """Draw a box from the first to the third quartile, its median, and a line from 0 to 95 %.

    The dot is the longest duration. The axis is logarithmic.
    """
    wide = max((text_width(one.name) for one in distributions), default=0)
    left = min(max(wide + 16, _LEFT), 280)
    low = max(min(one.low_s for one in distributions), 1e-6) / 1.15
    high = max(*(one.high_s for one in distributions), low * 4) * 1.15
    height = _ROW * len(distributions)
    panel = Panel(
        x=Axis(low, high, log=True),
        y=Axis(0.0, 1.0),
        left=left,
        top=48,
        width=PAGE - left - _RIGHT - 60,
        height=height,
    )
    parts = [*panel.frame(log_span_ticks(low, high), [], "duration of an attempt")]
    for number, one in enumerate(distributions):
        parts += _box(panel, one, 48 + _ROW * number + _ROW / 2)
    return figure(title, PAGE, 48 + height + 52, parts, alternative=alternative)


def _box(panel: Panel, one: Box, y: float) -> Iterator[str]:
    spots = (one.low_s, one.p25_s, one.median_s, one.p75_s, one.p95_s, one.high_s)
    low, p25, median, p75, p95, high = (panel.at(max(spot, 1e-6), 0.0)[0] for spot in spots)
    times = f"median {format_duration(one.median_s)}, 95 % below {format_duration(one.p95_s)}"
    times += f", longest {format_duration(one.high_s)}"
    said = f"{one.name}: {counted(one.count, 'attempt')}, {times}"
    stroke = 'stroke="currentColor" fill="none"'
    yield f"<g><title>{escaped(said)}</title>"
    yield text(panel.left - 8, y + 4, shortened(one.name, panel.left - 16), anchor="end")
    yield f'<path class="{DIM}" d="M{low:.1f} {y}H{p95:.1f}" {stroke}/>'
    box = f'x="{p25:.1f}" y="{y - 6}" width="{max(p75 - p25, 1):.1f}" height="12"'
    yield f'<rect class="{COLOURS[0]}" {box} fill-opacity="0.55"/>'
    yield f'<path class="{INK}" d="M{median:.1f} {y - 7}v14" {stroke} stroke-width="2"/>'
    yield f'<circle class="{COLOURS[1]}" cx="{high:.1f}" cy="{y}" r="3"/>'
    yield text(PAGE - _RIGHT, y + 4, f"{one.count:,}", anchor="end", colour=DIM)
    yield "</g>"


def sparks(values: Sequence[float | None], most: int = 60) -> str:
    """A curve in characters."""
    size = max(1, math.ceil(len(values) / most))
    known = [one or 0.0 for one in values]
    means = [sum(known[at : at + size]) / size for at in range(0, len(known), size)]
    top = max(means, default=0.0)
    marks = "▁▂▃▄▅▆▇█"
    return "".join(marks[round(one / top * 7) if top else 0] for one in means)
