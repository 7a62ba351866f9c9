"""The figures of a search: the best reward so far, and a heat map of the rewards by two keys."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.report import figures
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.bandit import ArmTable
    from hpc_toolkit.campaign.settings import Campaign

_HEIGHT = 210
"""Of the axes of the best reward so far."""
_COLUMNS, _ROWS, _LEVELS = 120, 50, 160
_BINS, _DISTINCT = 12, 24
"""Numbers with more different values than ``_DISTINCT`` are divided into ``_BINS``."""


def expected_best(rewards: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The expected best reward of n different arms drawn at random, for each n of ``counts``.

    Of N arms, the k-th best is the best of the draw with a probability of C(N-k, n-1) / C(N, n).
    """
    found, ranked = [], sorted(rewards, reverse=True)
    for drawn in counts:
        chance, best = drawn / len(ranked), 0.0
        for left, reward in zip(range(len(ranked) - 1, drawn - 2, -1), ranked, strict=False):
            best += chance * reward
            # The chance that the next arm is drawn, and none before it.
            chance *= (left - drawn + 1) / max(left, 1)
        found.append(best)
    return found


def some_counts(most: int) -> list[int]:
    """At most about 240 whole numbers from 1 to ``most``, close together at the begin."""
    spread = (round(most ** (number / 120)) for number in range(121))
    even = (1 + round((most - 1) * number / 120) for number in range(121))
    return sorted({*spread, *even}) if most >= 1 else []


class Step(NamedTuple):
    """The best arm after some evaluations."""

    evaluations: int
    seconds: float
    """Seconds that these evaluations took, added up."""
    arm: str
    reward: float
    """Of the arm over all tasks; of an arm of a race that lacks some, over its tasks."""


def best_so_far(
    steps: Sequence[Step],
    costs: tuple[float, float],
    order: Sequence[float],
    levels: Mapping[str, float],
) -> figures.Figure:
    """The best reward so far, over evaluations and over evaluation time.

    ``costs`` are the evaluations and the seconds of an arm. ``order`` are the rewards of all arms,
    to compare with a random order. ``levels`` are drawn as horizontal lines.
    """
    parts: list[str] = []
    left, top, width = 64.0, 0.0, (figures.PAGE - 24) / 2 - 64
    spent = [float(step.evaluations) for step in steps], [step.seconds for step in steps]
    for timed, (xs, cost) in enumerate(zip(spent, costs, strict=True)):
        lines = list(_lines(steps, xs, cost, order, levels))
        if not parts:  # one legend for both
            parts, high = figures.legend((key for key, _ in lines), 48, figures.PAGE - 20)
            top = 68 + high
        ys = [y for _, points in lines for _, y in points]
        most = max(x for _, points in lines for x, _ in points) or 1.0
        room = (max(ys) - min(ys)) * 0.06 or abs(max(ys)) * 0.05 or 1.0
        across, up = figures.Axis(0.0, most), figures.Axis(min(ys) - room, max(ys) + room)
        panel = figures.Panel(across, up, left, top, width, _HEIGHT)
        columns = figures.span_ticks(most, 6) if timed else figures.number_ticks(0.0, most)
        rows = figures.number_ticks(up.low, up.high)
        name = "evaluation time" if timed else "evaluations"
        parts += panel.frame(columns, rows, name, "best reward so far")
        parts += [panel.line(points, colour, style) for (colour, _, style), points in lines]
        left += width + 64
    last = steps[-1]
    since = next(step for step in steps if step.reward == last.reward)
    said = f"After {counted(last.evaluations, 'evaluation')} the best reward is {last.reward:.4f};"
    said += f" it was found after {since.evaluations:,}."
    return figures.on_page("Best reward so far", said, top + _HEIGHT + 56, parts)


def _lines(
    steps: Sequence[Step],
    spent: Sequence[float],
    cost: float,
    order: Sequence[float],
    levels: Mapping[str, float],
) -> Iterator[tuple[tuple[str, str, str], list[figures.Point]]]:
    """Colour, name and style of each line, and its points."""
    points = [(spent[0], steps[0].reward)]
    for at, step in zip(spent[1:], steps[1:], strict=True):
        points += [(at, points[-1][1]), (at, step.reward)]  # a reward holds until the next one
    yield (figures.COLOURS[0], "search", ""), points
    wide, end = 'stroke-width="2"', spent[-1]
    if order and cost > 0:
        counts = some_counts(min(len(order), max(1, math.ceil(end / cost))))
        best = zip((cost * count for count in counts), expected_best(order, counts), strict=True)
        points = [point for point in best if point[0] <= end * 1.02 or point[0] == cost]
        yield (figures.COLOURS[6], "random order (expected)", f"{wide} {figures.DASHED}"), points
    for number, (name, reward) in enumerate(levels.items(), 1):
        points = [(0.0, reward), (end, reward)]
        yield (figures.COLOURS[number], name, f"{wide} {figures.DOTTED}"), points


class Grid(NamedTuple):
    """Where each arm is drawn."""

    columns: Sequence[str]
    rows: Sequence[str]
    """The first one is drawn at the top."""
    places: Mapping[str, tuple[int, int]]
    """Column and row of an arm."""
    axes: tuple[str, str]
    note: str = ""
    """What is merged or averaged."""


class Key(NamedTuple):
    """A key of the arms, with its values as levels in their order."""

    name: str
    levels: Sequence[str]
    level_of: Mapping[str, int]
    """The level of each arm."""


_NAME = figures.text_width("n" * 120)


def brief(name: str) -> str:
    """The begin and the end of a name with more than 120 characters."""
    return figures.shortened(name, _NAME)


def grid_of_models(campaign: Campaign) -> Grid:
    """The checkpoints of all models across, and their layers upwards."""
    layers = {one for model in campaign.models for one in model.chosen or range(model.layers + 1)}
    rows = {layer: place for place, layer in enumerate(sorted(layers, reverse=True))}
    columns: list[str] = []
    places: dict[str, tuple[int, int]] = {}
    for model in campaign.models:
        steps = {step: len(columns) + place for place, step in enumerate(model.steps)}
        name = f"{model.name} " if len(campaign.models) > 1 else ""
        columns += [f"{name}{step}" for step in steps]
        for arm, (step, layer) in zip(model.arms(), model.points(), strict=True):
            places[arm.id] = steps[step], rows[layer]
    return _merged(Grid(columns, [*map(str, rows)], places, ("checkpoint (step)", "layer")))


def grid_of_keys(keys: Sequence[Key]) -> Grid:
    """The first two keys, with more levels across; a single key has one row."""
    one_row = Key("", [""], dict.fromkeys(keys[0].level_of, 0))
    across, down, *_ = sorted([*keys[:2], one_row], key=lambda key: -len(key.levels))
    last = len(down.levels) - 1
    places = {arm: (across.level_of[arm], last - down.level_of[arm]) for arm in across.level_of}
    note = ""
    if others := [brief(key.name) for key in keys[2:]]:
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        note = f"A tile is the mean of its evaluated arms over {', '.join(others[:6])}{more}."
    rows, axes = down.levels[::-1], (across.name, down.name)
    return _merged(Grid(across.levels, rows, places, axes, note))


def _merged(grid: Grid) -> Grid:
    """Merge neighbours until there are few enough tiles to see and to send."""
    wide, high = -(-len(grid.columns) // _COLUMNS), -(-len(grid.rows) // _ROWS)
    if wide == high == 1:
        return grid
    merged = f"A tile is the mean of {wide} x {high} neighbours: there are too many to draw."
    return Grid(
        grid.columns[::wide],
        grid.rows[::high],
        {arm: (column // wide, row // high) for arm, (column, row) in grid.places.items()},
        grid.axes,
        f"{grid.note} {merged}".strip(),
    )


def keys_of(arms: ArmTable) -> list[Key]:
    """The keys with 2 to 160 levels, in the order of the arms' keys."""
    names = dict.fromkeys(name for arm in arms.arms for name in arm.keys)
    keys = (
        Key(name, *_levels({arm.id: arm.keys.get(name) for arm in arms.arms})) for name in names
    )
    return [key for key in keys if 2 <= len(key.levels) <= _LEVELS]


def _levels(values: Mapping[str, Any]) -> tuple[list[str], dict[str, int]]:
    """The levels of a key's values by arm: numbers in order, other values as they first occur."""
    known = [one for one in values.values() if one is not None]
    numeric = all(isinstance(one, int | float) and not isinstance(one, bool) for one in known)
    if not numeric:
        texts = {arm: _text(value) for arm, value in values.items()}
        names = list(dict.fromkeys(texts.values()))
        places = {name: place for place, name in enumerate(names)}
        return names, {arm: places[text] for arm, text in texts.items()}
    ordered = sorted(set(known))
    more = ["(none)"] if len(known) < len(values) else []
    if len(ordered) <= _DISTINCT:
        edges, labels = ordered, [*map(_text, ordered), *more]
    else:
        edges = [ordered[number * len(ordered) // _BINS] for number in range(_BINS)]
        ends = [*edges[1:], ordered[-1]]
        labels = [f"{low:.3g} to {high:.3g}" for low, high in zip(edges, ends, strict=True)] + more
    return labels, {
        arm: len(edges) if value is None else bisect_right(edges, value) - 1
        for arm, value in values.items()
    }


def _text(value: Any) -> str:
    if value is None:
        return "(none)"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def reward_map(
    campaign: Campaign,
    arms: ArmTable,
    rewards: Mapping[str, float],
    *,
    asked: Collection[str],
    marks: Mapping[str, str],
    unit: str,
) -> tuple[figures.Figure, ...]:
    """The rewards of arms by model, checkpoint and layer, or by their first two keys.

    ``asked`` are outlined, ``marks`` are those of :class:`Tile`. Nothing without rewards, or if no
    key of the arms has several values.
    """
    keys = [] if campaign.rows is None else keys_of(arms)
    if not rewards or (campaign.rows is not None and not keys):
        return ()
    grid = grid_of_models(campaign) if campaign.rows is None else grid_of_keys(keys)
    here: dict[tuple[int, int], list[str]] = {}
    for arm, place in grid.places.items():
        here.setdefault(place, []).append(arm)
    tiles: Tiles = {}
    for place, some in here.items():
        known = [rewards[arm] for arm in some if arm in rewards]
        mark = " ".join(marks[arm] for arm in some if arm in marks)
        outlined = any(arm in asked for arm in some)
        tiles[place] = Tile(fmean(known) if known else None, outlined, mark)
    said = f"Rewards of {len(rewards):,} of {counted(len(grid.places), 'arm')};"
    said += f" the policy requested {counted(len(asked), 'arm')}."
    values = [tile.value for tile in tiles.values() if tile.value is not None]
    at, ends = _Place(grid), (min(values), max(values))
    parts = [*_legend(tiles.values()), *_scale(ends, unit, at), *_tiles(tiles, ends, at)]
    title = f"Reward by {' and '.join(filter(None, grid.axes))}"
    drawn = figures.on_page(title, said, at.bottom + 60, [*parts, *_axes(grid, at)])
    return (drawn._replace(caption=f"{said} {grid.note}".strip()),)


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


class Tile(NamedTuple):
    """One tile of a heat map."""

    value: float | None
    """None: unknown; the tile is empty."""
    outlined: bool
    mark: str
    """With ``best`` in it a filled circle, with ``truth`` a ring."""


Tiles = dict[tuple[int, int], Tile]
"""By column and row; a place without a tile is empty."""


def _level(value: float, ends: tuple[float, float]) -> int:
    """The number of a value's colour, from 0."""
    low, high = ends
    share = (value - low) / (high - low) if high > low else 0.5
    return min(max(int(share * len(SHADES)), 0), len(SHADES) - 1)


def _legend(tiles: Collection[Tile]) -> Iterator[str]:
    left, shade = 10.0, SHADES[len(SHADES) // 2]
    for name, kind, used in (
        ("requested by the policy", "", any(one.outlined for one in tiles)),
        ("best of the search", "best", any("best" in one.mark for one in tiles)),
        ("best of all arms", "truth", any("truth" in one.mark for one in tiles)),
    ):
        if used:
            yield f'<rect x="{left:.1f}" y="42" width="14" height="12" fill="{shade}"/>'
            box = f"M{left:.1f} 42h14v12h-14z"
            yield _mark(kind, left + 7, 48, 3.0) if kind else _outlines(box)
            yield figures.text(left + 20, 53, name)
            left += 40 + figures.text_width(name)


class _Place:
    """Where a map is on the page, and how large its tiles are."""

    def __init__(self, grid: Grid) -> None:
        longest = max(figures.text_width(label, 11) for label in grid.rows)
        self.labels = min(max(longest, 10.0), figures.PAGE * 0.3) + 6
        self.left, self.top = 10 + self.labels, 92.0
        columns, rows = len(grid.columns), len(grid.rows)
        self.x = min((figures.PAGE - 20 - self.labels) / columns, 56.0)
        self.y = min(max(self.x * 0.8, 5.0), 24.0, max(_MAP_HEIGHT / rows, 3.0))
        self.gap = 1.0 if min(self.x, self.y) >= 7 else 0.0
        self.bottom = self.top + rows * self.y


def _scale(ends: tuple[float, float], unit: str, at: _Place) -> Iterator[str]:
    low, high = (figures.number_label(float(f"{end:.3g}")) for end in ends)
    y, step = at.top - 14, 3.0
    yield figures.text(10, y, low, colour=figures.DIM, size=11)
    x = 10 + figures.text_width(low, 11) + 4
    for number, shade in enumerate(SHADES):
        place = f'x="{x + number * step:.1f}" y="{y - 9}" width="{step + 0.4}" height="10"'
        yield f'<rect {place} fill="{shade}"/>'
    x += len(SHADES) * step + 5
    said = f"{high} {unit}".rstrip()
    yield figures.text(x, y, figures.shortened(said, figures.PAGE - 10 - x, 11), size=11)


def _tiles(tiles: Tiles, ends: tuple[float, float], at: _Place) -> Iterator[str]:
    """The tiles in units of columns and rows, which take few bytes."""
    wide, high = (f"{1 - at.gap / size:.2f}".strip("0") for size in (at.x, at.y))
    box = f"h{wide}v{high}h-{wide}z"
    paths: dict[int, list[str]] = {}
    chosen, marks = [], []
    for (x, y), tile in tiles.items():
        if tile.value is not None:
            paths.setdefault(_level(tile.value, ends), []).append(f"M{x} {y}{box}")
        if tile.outlined:
            chosen.append(f"M{x} {y}{box}")
        if tile.mark:
            middle = at.left + (x + 0.5) * at.x, at.top + (y + 0.5) * at.y
            marks.append(_mark(tile.mark, *middle, max(2.5, min(at.x, at.y) * 0.25)))
    yield f'<g transform="translate({at.left:.1f} {at.top:.1f}) scale({at.x:.3f} {at.y:.3f})">'
    for number, boxes in sorted(paths.items()):
        sharp = "" if at.gap else ' shape-rendering="crispEdges"'
        yield f'<path class="tiles" fill="{SHADES[number]}" d="{"".join(boxes)}"{sharp}/>'
    yield _outlines("".join(chosen), 2.0 if min(at.x, at.y) >= 12 else 1.2) if chosen else ""
    yield from ("</g>", *marks)


def _axes(grid: Grid, at: _Place) -> Iterator[str]:
    every = max(1, -(-13 // max(1, int(at.y))))
    for number in range(0, len(grid.rows), every):
        y = at.top + (number + 0.5) * at.y + 4
        label = figures.shortened(grid.rows[number], at.labels, 11)
        yield figures.text(at.left - 5, y, label, anchor="end", size=11)
    widest = max(figures.text_width(label, 11) for label in grid.columns)
    every = max(1, round(min(widest + 8, 90.0) / at.x + 0.5))
    for number in range(0, len(grid.columns), every):
        x = at.left + (number + 0.5) * at.x
        label = figures.shortened(grid.columns[number], max(every * at.x - 4, 18), 11)
        yield figures.text(x, at.bottom + 13, label, anchor="middle", size=11)
    across, down = grid.axes
    said = f"columns: {across}; rows: {down}" if down else across
    yield figures.text(at.left, at.bottom + 28, said, colour=figures.DIM, size=11)


def _outlines(path: str, width: float = 2.0) -> str:
    """A dark line in a light line, or the other way round, so that it shows on every colour."""
    # Lines are as wide as everywhere, though tiles are scaled.
    line = f'd="{path}" fill="none" stroke="currentColor" vector-effect="non-scaling-stroke"'
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
