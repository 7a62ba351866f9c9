"""Heat maps of the rewards and metrics of a campaign's arms, and means by key."""

from __future__ import annotations

import math
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from hpc_toolkit.bandit.policy import number
from hpc_toolkit.campaign.arms import arm_id
from hpc_toolkit.campaign.scoremaps import (
    brief,
    by_level,
    heatmaps_of,
    keys_of,
    plane_of_keys,
    plane_of_models,
)
from hpc_toolkit.campaign.settings import METRICS
from hpc_toolkit.report.heatmap import heatmaps
from hpc_toolkit.report.page import Figure
from hpc_toolkit.report.plots import Estimate, Interval, intervals, with_error
from hpc_toolkit.results.gather import gather
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.campaign.scoremaps import Key, Plane
    from hpc_toolkit.campaign.searchfacts import SearchFacts
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.report.heatmap import HeatMap

_METRICS, _KEYS, _VALUES = 8, 8, 24
_WIDE = 40
"""A map with more columns has a row of its own."""


def _plane(facts: SearchFacts) -> Plane | None:
    """Where arms are drawn; None: they have fewer than two keys with several values."""
    campaign = facts.searched.campaign
    if campaign.rows is None:
        return plane_of_models(campaign)
    keys = _keys(facts)
    return plane_of_keys(keys) if len(keys) > 1 else None


def _keys(facts: SearchFacts) -> list[Key]:
    return keys_of(facts.searched.found.arms, facts.means)


def reward_maps(facts: SearchFacts) -> Iterator[Figure]:
    plane = _plane(facts)
    if plane is None or not facts.rewards:
        return
    words = {arm: _words(facts, arm) for arm in plane.places}
    maps = heatmaps_of(
        plane,
        facts.means,
        name="",
        words=words,
        asked=facts.asked,
        marks=_marks(facts),
        unit=facts.summary.scalariser if facts.summary else "",
    )
    across, down = plane.axes
    title = f"Reward by {across} and {down}"
    said = f"Rewards of {len(facts.rewards):,} of {counted(len(words), 'arm')};"
    said += f" the policy requested {counted(len(facts.asked), 'arm')}."
    yield Figure(
        title=title,
        svg=heatmaps(title, maps, alternative=said, per_row=_per_row(maps), marks=True),
        alt=said,
        caption=f"{said} {plane.note}".strip(),
    )


def _per_row(maps: Sequence[HeatMap]) -> int:
    columns = max(len(one.columns) for one in maps)
    if len(maps) == 1 or columns > _WIDE:
        return 1
    return 3 if len(maps) > 4 and columns <= _WIDE / 2 else 2


def _words(facts: SearchFacts, arm: str) -> str:
    reward, asked = facts.rewards.get(arm), facts.asked.get(arm)
    said = facts.searched.found.lacks(arm)
    said = said if reward is None else with_error(reward.mean, reward.stderr)
    return f"{said}, requested in round {asked}" if asked else said


def _marks(facts: SearchFacts) -> dict[str, str]:
    summary, marks = facts.summary, dict[str, str]()
    if summary is not None and summary.exhaustive is not None:
        marks[summary.exhaustive.arm] = "truth"
    if summary is not None and summary.best is not None:
        best = summary.best.arm
        marks[best] = " ".join(filter(None, ("best", marks.get(best))))
    return marks


def metric_maps(facts: SearchFacts, view: RunView) -> Iterator[Figure]:
    """The metrics on the same plane, those that the search uses first."""
    plane, values = _plane(facts), _metrics(facts, view)
    if plane is None or not values:
        return
    drawn = list(values)[:_METRICS]
    maps: list[HeatMap] = []
    for name in drawn:
        maps += heatmaps_of(plane, values[name], name=name)
    facets = len(plane.facets)
    title = f"Metrics by {plane.axes[0]} and {plane.axes[1]}"
    said = f"Metrics: {', '.join(drawn)}."
    hidden = len(values) - len(drawn)
    said += f" Not drawn: {hidden} more." if hidden else ""
    yield Figure(
        title=title,
        svg=heatmaps(
            title, maps, alternative=said, per_row=2 if facets == 1 else min(facets, 4), height=150
        ),
        alt=said,
        caption=f"{said} Each metric has its own scale.",
    )


def _metrics(facts: SearchFacts, view: RunView) -> dict[str, dict[str, float]]:
    """The known numbers by metric and arm, without those that repeat a key of the arm."""
    found: dict[str, dict[str, float]] = {
        name: {} for name in facts.searched.campaign.search.metrics
    }
    for row in gather(view, METRICS, partial=True).rows if METRICS in view.stages else ():
        for name, value in row["value"].items() if isinstance(row["value"], dict) else ():
            if name not in row["item"] and (known := number(value)) is not None:
                found.setdefault(name, {})[arm_id(row["item"])] = known
    decided = facts.searched.decisions[0].metrics or {}
    for name, column in decided.items():
        if not found.get(name):
            pairs = zip(facts.searched.found.arms.ids, column, strict=True)
            found[name] = {arm: value for arm, value in pairs if value is not None}
    return {name: values for name, values in found.items() if values}


def key_means(facts: SearchFacts) -> Iterator[Figure]:
    """The mean reward by value of each key, for campaigns that name their arms."""
    keys = _keys(facts) if facts.searched.campaign.rows is not None else []
    groups = [(key.name, list(_means(facts, key))) for key in keys[:_KEYS] if len(facts.rewards)]
    groups = [(name, some) for name, some in groups if some]
    if not groups:
        return
    name = "Mean reward by value of each key"
    said = "Share of the variance of the rewards that each key explains beyond the keys above it:"
    said += f" {', '.join(f'{key.name} {key.explained:.0%}' for key in keys[:_KEYS])}."
    hidden = len(keys) - len(groups)
    said += f" Not drawn: {counted(hidden, 'more key')}." if hidden > 0 else ""
    chosen = (
        "" if facts.evaluated_all else " The policy evaluated more arms where it expected more."
    )
    yield Figure(
        title=name,
        svg=intervals(
            name, groups, ("mean",), x="mean reward of the evaluated arms", alternative=said
        ),
        alt=said,
        caption=f"{said} The bars are standard errors of means over the evaluated arms.{chosen}",
        text="\n".join(f"{key} {one.said}" for key, some in groups for one in some),
    )


def _means(facts: SearchFacts, key: Key) -> Iterator[Estimate]:
    for level, found in sorted(by_level(key, facts.means).items())[:_VALUES]:
        mean = fmean(found)
        error = stdev(found, mean) / math.sqrt(len(found)) if len(found) > 1 else None
        name, arms = brief(key.levels[level]), counted(len(found), "arm")
        said = f"{name}: {with_error(mean, error)} over {arms}"
        yield Estimate(name=name, intervals=[Interval(mean, error)], said=said)
