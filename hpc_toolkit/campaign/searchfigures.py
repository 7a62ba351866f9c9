"""The figures of a search: the best reward so far, and a heat map of the rewards by two keys."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.report.axes import Axis, number_ticks, span_ticks
from hpc_toolkit.report.charts import Plot, Series, padded, plots, stepped
from hpc_toolkit.report.figures import COLOURS, DASHED, DOTTED, shortened, text_width
from hpc_toolkit.report.heatmap import HeatMap, Tile, heatmaps
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from hpc_toolkit.bandit import ArmTable
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.campaign.summary import Step
    from hpc_toolkit.report.figures import Figure

_COLUMNS, _ROWS, _FACETS, _TILES = 160, 64, 12, 6_000
_WIDE = 40
"""A map with more columns has a row of its own."""
_BINS, _DISTINCT = 12, 24
"""Numbers with more different values than ``_DISTINCT`` are divided into ``_BINS``."""


def expected_best(rewards: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The expected best reward of n different arms drawn at random, for each n of ``counts``.

    Of N arms, the k-th best is the best of the draw with a probability of C(N-k, n-1) / C(N, n).
    """
    ranked = sorted(rewards, reverse=True)
    return [math.fsum(_weighted(ranked, drawn)) for drawn in counts]


def _weighted(ranked: Sequence[float], drawn: int) -> Iterator[float]:
    chance, left = drawn / len(ranked), len(ranked)
    for reward in ranked:
        yield chance * reward
        # The chance that the next arm is drawn, and none before it.
        left -= 1
        if left < drawn:
            return
        chance *= (left - drawn + 1) / left


def some_counts(most: int, points: int = 120) -> list[int]:
    """At most about ``points`` whole numbers from 1 to ``most``, close together at the begin."""
    spread = (round(most ** (number / points)) for number in range(points + 1))
    even = (1 + round((most - 1) * number / points) for number in range(points + 1))
    return sorted({*spread, *even}) if most >= 1 else []


def best_so_far(
    steps: Sequence[Step],
    costs: tuple[float, float],
    order: Sequence[float],
    levels: Mapping[str, float],
) -> Figure:
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
        across, up = Axis(0.0, max(x for x, _ in points) or 1.0), padded(min(ys), max(ys))
        plot = Plot(
            x="evaluation time" if timed else "evaluations",
            y="best reward so far",
            across=across,
            up=up,
            columns=span_ticks(across.high, 6) if timed else number_ticks(0.0, across.high),
            rows=number_ticks(up.low, up.high),
            series=series,
        )
        drawn.append(plot)
    last = steps[-1]
    since = next(step for step in steps if step.reward == last.reward)
    said = f"After {counted(last.evaluations, 'evaluation')} the best reward is {last.reward:.4f};"
    said += f" it was found after {since.evaluations:,}."
    return plots("Best reward so far", said, drawn, beside=2)


def _lines(
    steps: Sequence[Step],
    spent: Sequence[float],
    cost: float,
    order: Sequence[float],
    levels: Mapping[str, float],
) -> Iterator[Series]:
    points = list(zip(spent, (step.reward for step in steps), strict=True))
    yield Series(name="search", points=stepped(points), colour=COLOURS[0])
    wide, end = 'stroke-width="2"', spent[-1]
    if order and cost > 0:
        counts = some_counts(min(len(order), max(1, math.ceil(end / cost))))
        best = zip((cost * count for count in counts), expected_best(order, counts), strict=True)
        points = [point for point in best if point[0] <= end * 1.02 or point[0] == cost]
        name, style = "random order (expected)", f"{wide} {DASHED}"
        yield Series(name=name, points=points, colour=COLOURS[6], style=style)
    for number, (name, reward) in enumerate(levels.items(), 1):
        points, style = [(0.0, reward), (end, reward)], f"{wide} {DOTTED}"
        yield Series(name=name, points=points, colour=COLOURS[number], style=style)


class Facet(NamedTuple):
    """The axes of one map."""

    name: str
    columns: Sequence[str]
    rows: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Where each arm is drawn."""

    facets: Sequence[Facet]
    places: Mapping[str, tuple[int, int, int]]
    """Facet, column and row of an arm."""
    axes: tuple[str, str]
    note: str = ""
    """What is merged, averaged or left out."""


class Key(NamedTuple):
    """A key of the arms, with its values as levels in their order."""

    name: str
    levels: Sequence[str]
    level_of: Mapping[str, int]
    """The level of each arm."""


_NAME = text_width("n" * 120)


def brief(name: str) -> str:
    """The begin and the end of a name with more than 120 characters."""
    return shortened(name, _NAME)


def plane_of_models(campaign: Campaign) -> Plane:
    """One facet for each model, with its checkpoints across and its layers upwards."""
    models = campaign.models[:_FACETS]
    facets, places = [], {}
    for number, model in enumerate(models):
        layers = list(model.chosen or range(model.layers + 1))
        columns = {step: place for place, step in enumerate(model.steps)}
        rows = {layer: len(layers) - 1 - place for place, layer in enumerate(layers)}
        facets.append(Facet(model.name, list(map(str, columns)), [str(one) for one in rows][::-1]))
        for arm, (step, layer) in zip(model.arms(), model.points(), strict=True):
            places[arm.id] = number, columns[step], rows[layer]
    hidden = len(campaign.models) - len(models)
    note = f"Not drawn: {counted(hidden, 'more model')}." if hidden else ""
    return binned(
        Plane(facets=facets, places=places, axes=("checkpoint (step)", "layer"), note=note)
    )


def plane_of_keys(keys: Sequence[Key]) -> Plane:
    """One facet of the first two keys, with more levels across; a single key has one row."""
    one_row = Key("", [""], dict.fromkeys(keys[0].level_of, 0))
    across, down, *_ = sorted([*keys[:2], one_row], key=lambda key: -len(key.levels))
    last = len(down.levels) - 1
    places = {arm: (0, across.level_of[arm], last - down.level_of[arm]) for arm in across.level_of}
    facet = Facet("", across.levels, down.levels[::-1])
    note = ""
    if others := [brief(key.name) for key in keys[2:]]:
        more = f" and {len(others) - 6} more" if len(others) > 6 else ""
        note = f"A tile is the mean of its evaluated arms over {', '.join(others[:6])}{more}."
    return binned(Plane(facets=[facet], places=places, axes=(across.name, down.name), note=note))


def binned(plane: Plane) -> Plane:
    """Merge neighbours until there are few enough tiles to see and to send."""
    across = max((len(one.columns) for one in plane.facets), default=1)
    down = max((len(one.rows) for one in plane.facets), default=1)
    wide, high = -(-across // _COLUMNS), -(-down // _ROWS)

    def tiles() -> int:
        return sum(-(-len(f.columns) // wide) * -(-len(f.rows) // high) for f in plane.facets)

    while tiles() > _TILES:
        if across / wide > down / high:
            wide += 1
        else:
            high += 1
    if wide == high == 1:
        return plane
    merged = f"A tile is the mean of {wide} x {high} neighbours: there are too many to draw."
    return replace(
        plane,
        facets=[Facet(f.name, f.columns[::wide], f.rows[::high]) for f in plane.facets],
        places={arm: (f, col // wide, row // high) for arm, (f, col, row) in plane.places.items()},
        note=f"{plane.note} {merged}".strip(),
    )


def keys_of(arms: ArmTable) -> list[Key]:
    """The keys with 2 to 160 levels, in the order of the arms' keys."""
    names = dict.fromkeys(name for arm in arms.arms for name in arm.keys)
    keys = (
        Key(name, *_levels({arm.id: arm.keys.get(name) for arm in arms.arms})) for name in names
    )
    return [key for key in keys if 2 <= len(key.levels) <= _COLUMNS]


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
) -> tuple[Figure, ...]:
    """The rewards of arms by model, checkpoint and layer, or by their first two keys.

    ``words`` describes an arm, ``asked`` are outlined, ``marks`` are those of :class:`Tile`.
    Nothing without rewards, or if no key of the arms has several values.
    """
    keys = [] if campaign.rows is None else keys_of(arms)
    if not rewards or (campaign.rows is not None and not keys):
        return ()
    plane = plane_of_models(campaign) if campaign.rows is None else plane_of_keys(keys)
    maps = heatmaps_of(plane, rewards, words=words, asked=asked, marks=marks, unit=unit)
    columns = max(len(one.columns) for one in maps)
    beside = 1 if len(maps) == 1 or columns > _WIDE else 2
    beside = 3 if len(maps) > 4 and columns <= _WIDE / 2 else beside
    title = f"Reward by {' and '.join(filter(None, plane.axes))}"
    said = f"Rewards of {len(rewards):,} of {counted(len(plane.places), 'arm')};"
    said += f" the policy requested {counted(len(asked), 'arm')}."
    figure = heatmaps(title, said, maps, per_row=beside)
    return (figure._replace(caption=f"{said} {plane.note}".strip()),)


def heatmaps_of(
    plane: Plane,
    values: Mapping[str, float],
    *,
    words: Callable[[str], str],
    asked: Collection[str],
    marks: Mapping[str, str],
    unit: str,
) -> list[HeatMap]:
    """One map for each facet, all with one scale."""
    here: dict[tuple[int, int, int], list[str]] = {}
    for arm, place in plane.places.items():
        here.setdefault(place, []).append(arm)
    tiles: list[dict[tuple[int, int], Tile]] = [{} for _ in plane.facets]
    for (facet, column, row), arms in here.items():
        known = [values[arm] for arm in arms if arm in values]
        value = fmean(known) if known else None
        if len(arms) == 1:
            said = f"{brief(arms[0])}: {words(arms[0])}"
        else:
            level, mean = plane.facets[facet], "unknown" if value is None else f"{value:.4g}"
            said = f"{brief(level.columns[column])}, {brief(level.rows[row])}: mean {mean}"
            said += f" of {len(known)} of {len(arms)} arms"
        mark = next((marks[arm] for arm in arms if arm in marks), "")
        outlined = any(arm in asked for arm in arms)
        tiles[facet][column, row] = Tile(value, said, outlined=outlined, mark=mark)
    drawn = [tile.value for some in tiles for tile in some.values() if tile.value is not None]
    scale = (min(drawn, default=0.0), max(drawn, default=1.0))
    return [
        HeatMap(
            name=facet.name,
            columns=facet.columns,
            rows=facet.rows,
            tiles=some,
            axes=plane.axes,
            scale=scale,
            unit=unit,
        )
        for facet, some in zip(plane.facets, tiles, strict=True)
    ]
