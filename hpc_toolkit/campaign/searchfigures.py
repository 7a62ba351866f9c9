"""The figures of a search: the best reward so far, and a heat map of the rewards by two keys."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.report import figures
from hpc_toolkit.report.charts import HeatMap, Plot, Series, Tile, heatmap, padded, plots, stepped
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.bandit import ArmTable
    from hpc_toolkit.campaign.settings import Campaign

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
    spent = [float(step.evaluations) for step in steps], [step.seconds for step in steps]
    drawn = []
    for timed, (xs, cost) in enumerate(zip(spent, costs, strict=True)):
        series = list(_lines(steps, xs, cost, order, levels))
        points = [point for line in series for point in line.points]
        ys = [y for _, y in points]
        across, up = figures.Axis(0.0, max(x for x, _ in points) or 1.0), padded(min(ys), max(ys))
        plot = Plot(
            x="evaluation time" if timed else "evaluations",
            y="best reward so far",
            across=across,
            up=up,
            columns=figures.span_ticks(across.high, 6)
            if timed
            else figures.number_ticks(0.0, across.high),
            rows=figures.number_ticks(up.low, up.high),
            series=series,
        )
        drawn.append(plot)
    last = steps[-1]
    since = next(step for step in steps if step.reward == last.reward)
    said = f"After {counted(last.evaluations, 'evaluation')} the best reward is {last.reward:.4f};"
    said += f" it was found after {since.evaluations:,}."
    return plots("Best reward so far", said, drawn)


def _lines(
    steps: Sequence[Step],
    spent: Sequence[float],
    cost: float,
    order: Sequence[float],
    levels: Mapping[str, float],
) -> Iterator[Series]:
    points = list(zip(spent, (step.reward for step in steps), strict=True))
    yield Series(name="search", points=stepped(points), colour=figures.COLOURS[0])
    wide, end = 'stroke-width="2"', spent[-1]
    if order and cost > 0:
        counts = some_counts(min(len(order), max(1, math.ceil(end / cost))))
        best = zip((cost * count for count in counts), expected_best(order, counts), strict=True)
        points = [point for point in best if point[0] <= end * 1.02 or point[0] == cost]
        name, style = "random order (expected)", f"{wide} {figures.DASHED}"
        yield Series(name=name, points=points, colour=figures.COLOURS[6], style=style)
    for number, (name, reward) in enumerate(levels.items(), 1):
        points, style = [(0.0, reward), (end, reward)], f"{wide} {figures.DOTTED}"
        yield Series(name=name, points=points, colour=figures.COLOURS[number], style=style)


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
    words: Callable[[str], str],
    asked: Collection[str],
    marks: Mapping[str, str],
    unit: str,
) -> tuple[figures.Figure, ...]:
    """The rewards of arms by model, checkpoint and layer, or by their first two keys.

    ``words`` describes an arm, ``asked`` are outlined, ``marks`` are those of :class:`Tile`.
    Nothing without rewards, or if no key of the arms has several values.
    """
    keys = [] if campaign.rows is None else keys_of(arms)
    if not rewards or (campaign.rows is not None and not keys):
        return ()
    grid = grid_of_models(campaign) if campaign.rows is None else grid_of_keys(keys)
    here: dict[tuple[int, int], list[str]] = {}
    for arm, place in grid.places.items():
        here.setdefault(place, []).append(arm)
    tiles: dict[tuple[int, int], Tile] = {}
    for (column, row), some in here.items():
        known = [rewards[arm] for arm in some if arm in rewards]
        value = fmean(known) if known else None
        if len(some) == 1:
            shown = f"{brief(some[0])}: {words(some[0])}"
        else:
            mean = "unknown" if value is None else f"{value:.4g}"
            shown = f"{brief(grid.columns[column])}, {brief(grid.rows[row])}: mean {mean}"
            shown += f" of {len(known)} of {len(some)} arms"
        mark = " ".join(marks[arm] for arm in some if arm in marks)
        outlined = any(arm in asked for arm in some)
        tiles[column, row] = Tile(value, shown, outlined=outlined, mark=mark)
    said = f"Rewards of {len(rewards):,} of {counted(len(grid.places), 'arm')};"
    said += f" the policy requested {counted(len(asked), 'arm')}."
    drawn = heatmap(
        f"Reward by {' and '.join(filter(None, grid.axes))}",
        said,
        HeatMap(columns=grid.columns, rows=grid.rows, tiles=tiles, axes=grid.axes, unit=unit),
    )
    return (drawn._replace(caption=f"{said} {grid.note}".strip()),)
