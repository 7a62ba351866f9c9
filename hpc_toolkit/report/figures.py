"""Draw charts as SVG, in one palette; equal numbers give equal bytes.

A figure has a title and one or more panels. Lengths are in pixels at full size. Colours are names
of CSS classes (:data:`COLOURS`, :data:`INK` and so on), so that a picture follows the reader's
light or dark setting, alone and inside of a page. An axis has a range, and values that are marked
on it with labels that fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from hpc_toolkit.system.quantities import DAY_S, HOUR_S, MINUTE_S
from hpc_toolkit.system.terminal import printable

Point = tuple[float, float]
Tick = tuple[float, str]
"""A value and its label."""
Ticks = Iterable[Tick]

COLOURS = ("c0", "c1", "c2", "c3", "c4", "c5", "c6")
"""Colours of the series in their order: those of Okabe and Ito, which colour-blind readers can tell
apart, darkened on a light page where they would be pale."""
INK, DIM, GRID, PAPER = "ink", "dim", "grid", "paper"
"""Text and axes; less important text; lines behind the curves; the page."""

_NAMES = (*COLOURS, INK, DIM, GRID, PAPER)
_LIGHT = "#0072b2 #d55e00 #009e73 #b5609a #3a9bd5 #c28800 #6b6b6b #1f2328 #59636e #d8dee4 #ffffff"
_DARK = "#2b8fd0 #e8702a #1db98c #d68bb5 #7cc4ee #e69f00 #a5a5a5 #e6edf3 #9ba7b4 #343b44 #15181d"


def _rules(palette: str) -> str:
    pairs = zip(_NAMES, palette.split(), strict=True)
    return "".join(f".fig.{name},.fig .{name}{{color:{value}}}" for name, value in pairs)


RULES = f"{_rules(_LIGHT)}@media screen and (prefers-color-scheme:dark){{{_rules(_DARK)}}}"
"""The palette as CSS; paper is light."""
STYLE = f"<style>{RULES}</style>\n"
"""In every picture, so that it is complete alone; a page has the rules once instead."""

PAGE = 860
"""Width of a figure of a page."""
DOTTED, DASHED = 'stroke-dasharray="2 3"', 'stroke-dasharray="6 4" stroke-opacity="0.6"'
AREA = "area"
_SOLID = 'stroke-width="2"'

_CHAR = 0.58
"""Width of a character by the size of its font, on average and a little more."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Two axes and their place on the page."""

    x: Axis
    y: Axis
    left: float
    top: float
    width: float
    height: float

    def at(self, x: float, y: float) -> Point:
        return self.left + self.width * self.x.share(x), self.top + self.height * (
            1 - self.y.share(y)
        )

    def frame(self, columns: Ticks, rows: Ticks, name: str, title: str = "") -> Iterator[str]:
        """Draw the lines behind the curves.

        Args:
            columns: values of the horizontal axis and their labels.
            rows: values of the vertical axis and their labels.
            name: what the horizontal axis shows, with its unit.
            title: what the vertical axis shows, above the panel.
        """
        bottom = self.top + self.height
        for value, label in rows:
            _, y = self.at(self.x.low, value)
            yield rule(f"M{self.left} {y:.1f}h{self.width}")
            yield text(self.left - 6, y + 4, label, anchor="end")
        for value, label in columns:
            x, _ = self.at(value, self.y.low)
            yield rule(f"M{x:.1f} {self.top}V{bottom}")
            yield text(x, bottom + 16, label, anchor="middle")
        yield text(self.left + self.width / 2, bottom + 36, name, anchor="middle")
        if title:
            yield text(self.left, self.top - 10, title)

    def line(self, points: Iterable[Point], colour: str, style: str = "") -> str:
        """Join points given in the units of the axes."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (self.at(*point) for point in points))
        return f'<path class="{colour}" d="M{path}" fill="none" {_STROKE} {style or _SOLID}/>'


_STROKE = 'stroke="currentColor"'


class Figure(NamedTuple):
    """A picture of a page."""

    title: str
    svg: str
    """The text of an SVG file; it is not escaped again."""
    caption: str = ""


def on_page(title: str, said: str, height: float, parts: Iterable[str]) -> Figure:
    """A picture as wide as a page; ``said`` describes it to readers who cannot see it."""
    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE} {height:.0f}"'
    size = f'width="{PAGE}" height="{height:.0f}" font-size="12" fill="currentColor"'
    lines = [
        f'<svg {box} {size} class="fig ink" role="img" font-family="system-ui,sans-serif">',
        f"<title>{escaped(title)}</title>",
        f"<desc>{escaped(said)}</desc>",
        f'{STYLE}<rect class="{PAPER}" width="100%" height="100%"/>',
        text(10, 24, title, size=15),
        *filter(None, parts),
        "</svg>\n",
    ]
    return Figure(title, "\n".join(lines))


def legend(
    names: Iterable[tuple[str, str, str]], top: float, width: float
) -> tuple[list[str], float]:
    """Name series, given as colours, names and styles; an area has the style ``AREA``.

    Returns the drawing, in rows of at most ``width``, and the height of these rows.
    """
    parts: list[str] = []
    left, y = 10.0, top
    for colour, name, style in names:
        need = 28 + text_width(name)
        if left > 10 and left + need > width:
            left, y = 10.0, y + 20
        if style == AREA:
            place = f'x="{left:.1f}" y="{y - 10}" width="12" height="12"'
            parts.append(f'<rect class="{colour}" {place}/>')
        else:
            line = f'd="M{left:.1f} {y - 4}h12" {_STROKE} {style or _SOLID}'
            parts.append(f'<path class="{colour}" {line}/>')
        parts.append(text(left + 17, y, shortened(name, width - 30)))
        left += need + 6
    return parts, (y + 20 - top if parts else 0.0)


def text(
    x: float, y: float, words: str, *, anchor: str = "start", colour: str = "", size: int = 12
) -> str:
    """Write one line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}"'
    place += f' text-anchor="{anchor}"' if anchor != "start" else ""
    place += f' class="{colour}"' if colour and colour != INK else ""
    place += f' font-size="{size}"' if size != 12 else ""
    return f"<text {place}>{escaped(words)}</text>"


def escaped(words: str) -> str:
    """Text for SVG or HTML: no markup, and nothing that is invisible or changes the direction."""
    return escape(printable(words))


def text_width(words: str, size: int = 12) -> float:
    """About how wide a line of text is."""
    return len(words) * size * _CHAR


def shortened(words: str, width: float, size: int = 12) -> str:
    """Text that fits into a width, else its begin and its end: the end often tells names apart."""
    words = printable(words)
    most = max(3, int(width / (size * _CHAR)))
    if len(words) <= most:
        return words
    end = (most - 1) // 2
    return f"{words[: most - 1 - end]}…{words[len(words) - end :]}"


def rule(path: str) -> str:
    """A thin line behind the curves."""
    return f'<path class="{GRID}" d="{path}" {_STROKE}/>'


_UNITS = ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_STEPS_S = (
    *(1, 2, 5, 10, 15, 30, MINUTE_S, 2 * MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, 15 * MINUTE_S),
    *(30 * MINUTE_S, HOUR_S, 2 * HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 2 * DAY_S),
    *(7 * DAY_S, 14 * DAY_S, 30 * DAY_S, 90 * DAY_S, 365 * DAY_S),
)


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float

    def share(self, value: float) -> float:
        """How far along the axis a value is, from 0 to 1; a value outside it is at its end."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(max(share, 0.0), 1.0)


def number_label(value: float) -> str:
    """A number without an exponent where it fits: ``20,000``, ``2M``, ``0.05``."""
    for factor, unit in ((1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def number_ticks(low: float, high: float) -> list[Tick]:
    """Round numbers from ``low`` to ``high``, at most about 6."""
    step = _round_step(high - low, 6)
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
