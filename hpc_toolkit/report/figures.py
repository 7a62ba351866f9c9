"""Draw line charts as SVG; equal numbers give equal bytes.

A figure is a white page with a title and one or more panels. Lengths are in pixels at full size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Point = tuple[float, float]
    Ticks = Iterable[tuple[float, str]]

COLOURS = (
    *("#2a6f97", "#c1440e", "#3a7d44", "#7b4b94", "#b8860b", "#d1495b"),
    *("#1b998b", "#6c757d", "#5f0f40", "#0b6e4f", "#8d6a9f", "#495057"),
)
"""Colours of the series in their order, repeated after the last one."""

WIDTH, HEIGHT = 380, 250
"""Size of a panel between its axes."""
LEFT, TOP = 80, 64
"""Where the first panel begins; its labels are outside."""
STEP_X, STEP_Y = WIDTH + 90, HEIGHT + 100
"""Distance between two panels."""
DOTTED, DASHED = 'stroke-dasharray="2 3"', 'stroke-dasharray="6 4" stroke-opacity="0.6"'

_LINE = 16


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


@dataclass(frozen=True, slots=True)
class Panel:
    """Two axes and their place on the page."""

    x: Axis
    y: Axis
    left: float = LEFT
    top: float = TOP

    def at(self, x: float, y: float) -> Point:
        return self.left + WIDTH * self.x.share(x), self.top + HEIGHT * (1 - self.y.share(y))

    def frame(self, columns: Ticks, rows: Ticks, name: str, title: str = "") -> Iterator[str]:
        """Draw the lines behind the curves.

        Args:
            columns: values of the horizontal axis and their labels, of one or more lines.
            rows: values of the vertical axis and their labels.
            name: what the horizontal axis shows.
            title: what the vertical axis shows, above the panel.
        """
        bottom, lines = self.top + HEIGHT, 1
        for value, label in rows:
            _, y = self.at(self.x.low, value)
            yield f'<path d="M{self.left} {y:.1f}h{WIDTH}" stroke="#ddd"/>'
            yield text(self.left - 6, y + 4, label, anchor="end")
        for value, label in columns:
            x, _ = self.at(value, self.y.low)
            yield f'<path d="M{x:.1f} {self.top}V{bottom}" stroke="#eee"/>'
            said = label.split("\n")
            lines = max(lines, len(said))
            for number, one in enumerate(said, 1):
                colour = "#000" if number == 1 else "#555"
                yield text(x, bottom + _LINE * number, one, anchor="middle", colour=colour)
        below = bottom + _LINE * lines + 20
        yield text(self.left + WIDTH / 2, below, name, anchor="middle")
        if title:
            yield text(self.left, self.top - 10, title)

    def line(self, points: Iterable[Point], colour: str, style: str = "") -> str:
        """Join points given in the units of the axes."""
        path = _path([self.at(x, y) for x, y in points])
        style = style or 'stroke-width="2"'
        return f'<path d="{path}" fill="none" stroke="{colour}" {style}/>'

    def dots(self, points: Iterable[Point], colour: str) -> Iterator[str]:
        for x, y in (self.at(x, y) for x, y in points):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'

    def band(self, lower: Sequence[Point], upper: Sequence[Point], colour: str) -> str:
        """Fill the area between two curves."""
        path = _path([self.at(x, y) for x, y in [*upper, *lower[::-1]]])
        return f'<path d="{path}Z" fill="{colour}" fill-opacity="0.15"/>'


def legend(left: float, top: float, names: Iterable[str]) -> Iterator[str]:
    """Name the series in their order, each in a line of 20 pixels."""
    for number, (name, colour) in enumerate(zip(names, cycle(COLOURS), strict=False)):
        y = top + 20 * number
        yield f'<path d="M{left} {y - 4}h24" stroke="{colour}" stroke-width="2.5"/>'
        yield text(left + 32, y, name)


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = "#000", size: int = 12
) -> str:
    """Write one line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f"<text {place}>{escape(words)}</text>"


def figure(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Return a whole picture as the text of an SVG file."""
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
    lines = [
        f'<svg {box} font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        text(10, 24, title, size=15),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
