"""Draw heat maps as small multiples: tiles by column and row, with a scale of colours for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.report.axes import number_label
from hpc_toolkit.report.figures import (
    DIM,
    INK,
    PAGE,
    PAPER,
    Figure,
    escaped,
    figure,
    shortened,
    text,
    text_width,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_TITLED = 1_500
"""With more tiles, only those that are outlined show their value under the mouse."""
_GAP_X, _GAP_Y, _HEAD = 30, 26, 44
_HEIGHT = 320.0
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
    """The tiles of one map."""

    name: str
    columns: Sequence[str]
    rows: Sequence[str]
    tiles: Mapping[tuple[int, int], Tile]
    """By column and row; a place without a tile is empty."""
    axes: tuple[str, str]
    """What the columns and the rows are."""
    scale: tuple[float, float]
    """The values with the first and the last colour."""
    unit: str = ""


def level(value: float, scale: tuple[float, float]) -> int:
    """The number of a value's colour, from 0."""
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(int(share * len(SHADES)), 0), len(SHADES) - 1)


def heatmaps(title: str, said: str, maps: Sequence[HeatMap], *, per_row: int) -> Figure:
    """Draw the maps in rows of ``per_row``, with a legend of outlines and marks."""
    wide = (PAGE - 20 - _GAP_X * (per_row - 1)) / per_row
    titled = sum(len(one.tiles) for one in maps) <= _TITLED
    top, parts = 66.0, list(_legend(maps))
    for first in range(0, len(maps), per_row):
        some = [
            _Drawing(one, 10 + place * (wide + _GAP_X), top, wide)
            for place, one in enumerate(maps[first : first + per_row])
        ]
        parts += (line for one in some for line in one.draw(titled=titled))
        top = max(one.bottom for one in some) + _GAP_Y
    return Figure(title, said, figure(title, PAGE, top, parts, alternative=said))


def _legend(maps: Sequence[HeatMap]) -> Iterator[str]:
    tiles = [tile for one in maps for tile in one.tiles.values()]
    left = 10.0
    for name, tile, used in (
        ("requested by the policy", Tile(0.5, outlined=True), any(one.outlined for one in tiles)),
        ("best of the search", Tile(0.5, mark="best"), any("best" in one.mark for one in tiles)),
        ("best of all arms", Tile(0.5, mark="truth"), any("truth" in one.mark for one in tiles)),
        ("unknown", Tile(None), any(one.value is None for one in tiles)),
    ):
        if not used:
            continue
        shade = SHADES[len(SHADES) // 2]
        if tile.value is not None:
            yield f'<rect x="{left:.1f}" y="42" width="14" height="12" fill="{shade}"/>'
        else:
            yield _unknown(f"M{left:.1f} 54l14-12")
        if tile.outlined:
            yield _outlines(f"M{left:.1f} 42h14v12h-14z")
        if tile.mark:
            yield _mark(tile.mark, left + 7, 48, 3.0)
        yield text(left + 20, 53, name)
        left += 20 + text_width(name) + 20


class _Drawing:
    """One map at its place on the page."""

    def __init__(self, drawn: HeatMap, left: float, top: float, width: float) -> None:
        self.map = drawn
        longest = max((text_width(one, 11) for one in drawn.rows), default=0.0)
        self._labels = min(max(longest, 10.0), width * 0.3) + 6
        head = _HEAD if drawn.name else _HEAD - 18
        self.left, self.top, self.head = left + self._labels, top + head, top
        self.width = width - self._labels
        columns, rows = max(1, len(drawn.columns)), max(1, len(drawn.rows))
        self.x = min(self.width / columns, 56.0)
        self.y = min(max(self.x * 0.8, 5.0), 24.0, max(_HEIGHT / rows, 3.0))
        self.gap = 1.0 if min(self.x, self.y) >= 7 else 0.0
        self.bottom = self.top + rows * self.y + 34

    def draw(self, *, titled: bool) -> Iterator[str]:
        yield from self._bar()
        yield from self._tiles(titled=titled)
        yield from self._axes()

    def _bar(self) -> Iterator[str]:
        """The name of the map, and below it the scale of its colours."""
        name, begin = self.map.name, self.left - self._labels
        if name:
            yield text(begin, self.head + 12, shortened(name, self.width + self._labels))
        low, high = map(number_label, (_short(self.map.scale[0]), _short(self.map.scale[1])))
        x, y = begin, self.top - 14
        yield text(x, y, low, colour=DIM, size=11)
        x += text_width(low, 11) + 4
        step = 3.0
        for number, shade in enumerate(SHADES):
            place = f'x="{x + number * step:.1f}" y="{y - 9}" width="{step + 0.4}" height="10"'
            yield f'<rect {place} fill="{shade}"/>'
        x += len(SHADES) * step + 5
        said = f"{high} {self.map.unit}".rstrip()
        yield text(x, y, shortened(said, begin + self.width + self._labels - x, 11), size=11)

    def _tiles(self, *, titled: bool) -> Iterator[str]:
        """The tiles in units of columns and rows, which take few bytes."""
        wide, high = (f"{1 - self.gap / size:.2f}".strip("0") for size in (self.x, self.y))
        box = f"h{wide}v{high}h-{wide}z"
        paths: dict[int, list[str]] = {}
        empty, chosen, said = [], [], []
        for (x, y), tile in self.map.tiles.items():
            if tile.value is None:
                empty.append(f"M{x} {y + 1}l1-1")
            else:
                paths.setdefault(level(tile.value, self.map.scale), []).append(f"M{x} {y}{box}")
            if tile.outlined:
                chosen.append(f"M{x} {y}{box}")
            if tile.said and (titled or tile.outlined or tile.mark):
                words = f"<title>{escaped(tile.said)}</title>"
                said.append(f'<path d="M{x} {y}{box}" fill-opacity="0">{words}</path>')
        scale = f"translate({self.left:.1f} {self.top:.1f}) scale({self.x:.3f} {self.y:.3f})"
        yield f'<g transform="{scale}">'
        for number, boxes in sorted(paths.items()):
            sharp = "" if self.gap else ' shape-rendering="crispEdges"'
            yield f'<path class="tiles" fill="{SHADES[number]}" d="{"".join(boxes)}"{sharp}/>'
        if empty:
            yield _unknown("".join(empty))
        if chosen:
            yield _outlines("".join(chosen), 2.0 if min(self.x, self.y) >= 12 else 1.2)
        yield from said
        yield "</g>"
        for (x, y), tile in self.map.tiles.items():
            if tile.mark:
                middle = self.left + (x + 0.5) * self.x, self.top + (y + 0.5) * self.y
                yield _mark(tile.mark, *middle, max(2.5, min(self.x, self.y) * 0.25))

    def _axes(self) -> Iterator[str]:
        bottom = self.top + len(self.map.rows) * self.y
        every = max(1, -(-13 // max(1, int(self.y))))
        for number in range(0, len(self.map.rows), every):
            y = self.top + (number + 0.5) * self.y + 4
            label = shortened(self.map.rows[number], self._labels, 11)
            yield text(self.left - 5, y, label, anchor="end", size=11)
        widest = max((text_width(one, 11) for one in self.map.columns), default=10.0)
        every = max(1, round(min(widest + 8, 90.0) / self.x + 0.5))
        for number in range(0, len(self.map.columns), every):
            x = self.left + (number + 0.5) * self.x
            label = shortened(self.map.columns[number], max(every * self.x - 4, 18), 11)
            yield text(x, bottom + 13, label, anchor="middle", size=11)
        across, down = self.map.axes
        yield text(self.left, bottom + 28, f"columns: {across}; rows: {down}", colour=DIM, size=11)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


_KEPT = 'vector-effect="non-scaling-stroke"'
"""Lines are as wide as everywhere, though tiles are scaled."""


def _unknown(path: str) -> str:
    line = f'd="{path}" stroke="currentColor" stroke-opacity="0.55"'
    return f'<path class="unknown {DIM}" {line} {_KEPT}/>'


def _outlines(path: str, width: float = 2.0) -> str:
    """A dark line in a light line, or the other way round, so that it shows on every colour."""
    line = f'd="{path}" fill="none" stroke="currentColor" {_KEPT}'
    halo = f'<path class="{PAPER}" {line} stroke-width="{2 * width}"/>'
    return f'{halo}<path class="asked {INK}" {line} stroke-width="{width}"/>'


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
