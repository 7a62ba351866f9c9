"""Charts of a page: lines on two axes, and heat maps with a scale of colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_toolkit.report import figures

_LEFT, _RIGHT, _TOP = 64, 24, 48
_HEIGHT, _GAP = 210, 56


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line through points, in the units of the axes."""

    name: str
    """Its text in the legend; a line without a name is not in the legend."""
    points: Sequence[figures.Point]
    colour: str
    style: str = ""
    """SVG attributes of the line, such as ``DASHED``; a line of width 2 by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Lines on the same axes."""

    x: str
    """Name of the horizontal axis, with its unit."""
    y: str
    across: figures.Axis
    up: figures.Axis
    columns: figures.Ticks
    """Values of the horizontal axis and their labels."""
    rows: figures.Ticks
    series: Sequence[Series]


def plots(title: str, said: str, drawn: Sequence[Plot]) -> figures.Figure:
    """Draw plots beside each other with one legend; ``said`` describes them in words."""
    width = (figures.PAGE - _RIGHT) / len(drawn) - _LEFT
    lines = [line for plot in drawn for line in plot.series if line.name and line.points]
    names = dict.fromkeys((line.colour, line.name, line.style) for line in lines)
    parts, high = figures.legend(names, _TOP, figures.PAGE - 20)
    top = _TOP + high + 20
    for number, plot in enumerate(drawn):
        panel = figures.Panel(
            x=plot.across,
            y=plot.up,
            left=_LEFT + number * (width + _LEFT),
            top=top,
            width=width,
            height=_HEIGHT,
        )
        parts += panel.frame(plot.columns, plot.rows, plot.x, plot.y)
        for line in plot.series:
            parts += [panel.line(line.points, line.colour, line.style)] if line.points else []
    return figures.on_page(title, said, top + _HEIGHT + _GAP, parts)


def padded(low: float, high: float) -> figures.Axis:
    """An axis with a little room at both ends."""
    room = max((high - low) * 0.06, abs(high) * 1e-6)
    room = abs(high) * 0.05 or 1.0 if high == low else room
    return figures.Axis(low - room, high + room)


def stepped(points: Sequence[figures.Point]) -> list[figures.Point]:
    """Hold each value until the next point."""
    found: list[figures.Point] = []
    for x, y in points:
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found


_TITLED = 1_500
"""With more tiles, only those that are outlined show their value under the mouse."""
_MAP_HEIGHT = 320.0
"""Of the tiles of a map, unless they would be too thin to see."""
SHADES = (
    *("#440154", "#450e60", "#471b6c", "#482878", "#45337e", "#413e83", "#3e4989", "#3a538b"),
    *("#355e8c", "#31688e", "#2d718e", "#2a798e", "#26828e", "#248b8c", "#21958b", "#1f9e89"),
    *("#26a684", "#2eaf7e", "#35b779", "#48bf6e", "#5bc663", "#6ece58", "#86d349", "#9dd93a"),
    *("#b5de2b", "#cde129", "#e5e427", "#fde725"),
)
"""The scale viridis: colour-blind readers and a print in grey can tell the order. Tiles of one
colour are one path, so that a page stays small."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile of a heat map."""

    value: float | None
    """None: unknown, or not a number."""
    said: str = ""
    """What it shows, in words."""
    outlined: bool = False
    mark: str = ""
    """With ``best`` in it a filled circle, with ``truth`` a ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    columns: Sequence[str]
    rows: Sequence[str]
    tiles: Mapping[tuple[int, int], Tile]
    """By column and row; a place without a tile is empty."""
    axes: tuple[str, str]
    """What the columns and the rows are; "": there is one row."""
    unit: str = ""

    @property
    def scale(self) -> tuple[float, float]:
        """The values with the first and the last colour."""
        values = [tile.value for tile in self.tiles.values() if tile.value is not None]
        return min(values, default=0.0), max(values, default=1.0)


def level(value: float, scale: tuple[float, float]) -> int:
    """The number of a value's colour, from 0."""
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(int(share * len(SHADES)), 0), len(SHADES) - 1)


def heatmap(title: str, said: str, drawn: HeatMap) -> figures.Figure:
    """Draw a map with a legend of outlines and marks; ``said`` describes it in words."""
    at = _Place(drawn)
    parts = [*_legend(drawn), *_scale(drawn, at), *_tiles(drawn, at), *_axes(drawn, at)]
    return figures.on_page(title, said, at.bottom + 60, parts)


def _legend(drawn: HeatMap) -> Iterator[str]:
    tiles = drawn.tiles.values()
    left = 10.0
    for name, tile, used in (
        ("requested by the policy", Tile(0.5, outlined=True), any(t.outlined for t in tiles)),
        ("best of the search", Tile(0.5, mark="best"), any("best" in t.mark for t in tiles)),
        ("best of all arms", Tile(0.5, mark="truth"), any("truth" in t.mark for t in tiles)),
        ("unknown", Tile(None), any(t.value is None for t in tiles)),
    ):
        if used:
            shade = SHADES[len(SHADES) // 2]
            box = f'x="{left:.1f}" y="42" width="14" height="12"'
            yield f'<rect {box} fill="{shade}"/>'
            if tile.value is None:
                yield f'<rect class="{figures.PAPER}" {box}/>'
                yield _unknown(f"M{left:.1f} 54l14-12")
            yield _outlines(f"M{left:.1f} 42h14v12h-14z") if tile.outlined else ""
            yield _mark(tile.mark, left + 7, 48, 3.0)
            yield figures.text(left + 20, 53, name)
            left += 40 + figures.text_width(name)


class _Place:
    """Where a map is on the page, and how large its tiles are."""

    def __init__(self, drawn: HeatMap) -> None:
        longest = max((figures.text_width(label, 11) for label in drawn.rows), default=0.0)
        self.labels = min(max(longest, 10.0), figures.PAGE * 0.3) + 6
        self.left, self.top = 10 + self.labels, 92.0
        columns, rows = max(1, len(drawn.columns)), max(1, len(drawn.rows))
        self.x = min((figures.PAGE - 20 - self.labels) / columns, 56.0)
        self.y = min(max(self.x * 0.8, 5.0), 24.0, max(_MAP_HEIGHT / rows, 3.0))
        self.gap = 1.0 if min(self.x, self.y) >= 7 else 0.0
        self.bottom = self.top + rows * self.y


def _scale(drawn: HeatMap, at: _Place) -> Iterator[str]:
    low, high = (figures.number_label(float(f"{end:.3g}")) for end in drawn.scale)
    y, step = at.top - 14, 3.0
    yield figures.text(10, y, low, colour=figures.DIM, size=11)
    x = 10 + figures.text_width(low, 11) + 4
    for number, shade in enumerate(SHADES):
        place = f'x="{x + number * step:.1f}" y="{y - 9}" width="{step + 0.4}" height="10"'
        yield f'<rect {place} fill="{shade}"/>'
    x += len(SHADES) * step + 5
    said = f"{high} {drawn.unit}".rstrip()
    yield figures.text(x, y, figures.shortened(said, figures.PAGE - 10 - x, 11), size=11)


def _tiles(drawn: HeatMap, at: _Place) -> Iterator[str]:
    """The tiles in units of columns and rows, which take few bytes."""
    wide, high = (f"{1 - at.gap / size:.2f}".strip("0") for size in (at.x, at.y))
    box = f"h{wide}v{high}h-{wide}z"
    scale, titled = drawn.scale, len(drawn.tiles) <= _TITLED
    paths: dict[int, list[str]] = {}
    empty, chosen, said, marks = [], [], [], []
    for (x, y), tile in drawn.tiles.items():
        if tile.value is None:
            empty.append(f"M{x} {y + 1}l1-1")
        else:
            paths.setdefault(level(tile.value, scale), []).append(f"M{x} {y}{box}")
        if tile.outlined:
            chosen.append(f"M{x} {y}{box}")
        if tile.said and (titled or tile.outlined or tile.mark):
            words = f"<title>{figures.escaped(tile.said)}</title>"
            said.append(f'<path d="M{x} {y}{box}" fill-opacity="0">{words}</path>')
        if tile.mark:
            middle = at.left + (x + 0.5) * at.x, at.top + (y + 0.5) * at.y
            marks.append(_mark(tile.mark, *middle, max(2.5, min(at.x, at.y) * 0.25)))
    yield f'<g transform="translate({at.left:.1f} {at.top:.1f}) scale({at.x:.3f} {at.y:.3f})">'
    for number, boxes in sorted(paths.items()):
        sharp = "" if at.gap else ' shape-rendering="crispEdges"'
        yield f'<path class="tiles" fill="{SHADES[number]}" d="{"".join(boxes)}"{sharp}/>'
    yield _unknown("".join(empty)) if empty else ""
    yield _outlines("".join(chosen), 2.0 if min(at.x, at.y) >= 12 else 1.2) if chosen else ""
    yield from (*said, "</g>", *marks)


def _axes(drawn: HeatMap, at: _Place) -> Iterator[str]:
    every = max(1, -(-13 // max(1, int(at.y))))
    for number in range(0, len(drawn.rows), every):
        y = at.top + (number + 0.5) * at.y + 4
        label = figures.shortened(drawn.rows[number], at.labels, 11)
        yield figures.text(at.left - 5, y, label, anchor="end", size=11)
    widest = max((figures.text_width(label, 11) for label in drawn.columns), default=10.0)
    every = max(1, round(min(widest + 8, 90.0) / at.x + 0.5))
    for number in range(0, len(drawn.columns), every):
        x = at.left + (number + 0.5) * at.x
        label = figures.shortened(drawn.columns[number], max(every * at.x - 4, 18), 11)
        yield figures.text(x, at.bottom + 13, label, anchor="middle", size=11)
    across, down = drawn.axes
    said = f"columns: {across}; rows: {down}" if down else across
    yield figures.text(at.left, at.bottom + 28, said, colour=figures.DIM, size=11)


_KEPT = 'vector-effect="non-scaling-stroke"'
"""Lines are as wide as everywhere, though tiles are scaled."""


def _unknown(path: str) -> str:
    line = f'd="{path}" stroke="currentColor" stroke-opacity="0.55"'
    return f'<path class="unknown {figures.DIM}" {line} {_KEPT}/>'


def _outlines(path: str, width: float = 2.0) -> str:
    """A dark line in a light line, or the other way round, so that it shows on every colour."""
    line = f'd="{path}" fill="none" stroke="currentColor" {_KEPT}'
    halo = f'<path class="{figures.PAPER}" {line} stroke-width="{2 * width}"/>'
    return f'{halo}<path class="asked {figures.INK}" {line} stroke-width="{width}"/>'


def _mark(kind: str, x: float, y: float, size: float) -> str:
    place, drawn = f'cx="{x:.1f}" cy="{y:.1f}"', ""
    if "truth" in kind:
        line = f'{place} r="{size + 2.5:.1f}" fill="none"'
        drawn += f'<circle {line} stroke="#fff" stroke-width="4"/>'
        drawn += f'<circle class="truth" {line} stroke="#000" stroke-width="1.8"/>'
    if "best" in kind:
        ring = f'stroke="#fff" stroke-width="1.2" fill="#000" {place} r="{size:.1f}"'
        drawn += f'<circle class="best" {ring}/>'
    return drawn
