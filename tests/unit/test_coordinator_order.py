"""How the coordinator cuts asks, and in which order the tasks of an arm stand: longest first."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import hpc_toolkit.campaign.coordinator
import tests.unit.playedcampaign
from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.engines.localcampaign import make_campaign_run
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import SECONDS, toy, work

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.queue.items import Segment

CAMPAIGN = toy(
    {"policy": "gp-ucb", "budget": 4, "pending": 2, "asks": "window"},
    models=[{"name": "s", "layers": 2, "size": 1000, "steps": [0, 1]}],
)


def coordinate(root: Path, campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    """The asks of a whole campaign, whose items somebody does whenever the coordinator waits."""
    make_campaign_run(root, campaign, ())
    monkeypatch.setattr(
        hpc_toolkit.campaign.coordinator, "time", SimpleNamespace(sleep=lambda _: work(root))
    )

    Coordinator(Run.open(root).view, campaign).run()

    view = Run.open(root).view
    view.poll()
    return list(view.stages["tasks"].log.segments.values())


def test_tasks_that_took_milliseconds_are_claimed_several_at_a_time(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a task has been told, it is claimed alone, and so are all if one takes long."""
    quick = {"a": 0.001, "b": 0.0005, "c": 0.0015}
    sizes = {}
    for name, seconds in (("quick", quick), ("mixed", {**quick, "c": 30.0})):
        monkeypatch.setattr(tests.unit.playedcampaign, "SECONDS", seconds)
        found = coordinate(fast_dir / name, CAMPAIGN, monkeypatch)
        sizes[name] = [[unit.count for unit in segment.units] for segment in found]

    assert sizes == {"quick": [[1] * 6, [3], [3]], "mixed": [[1] * 6, [1] * 3, [1] * 3]}


def test_segments_of_the_coordinator_are_cut_by_their_number_of_items(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hpc_toolkit.campaign.coordinator, "_ITEMS_A_UNIT", 60)
    names = tuple(f"t{number}" for number in range(30))
    campaign = replace(
        CAMPAIGN,
        models=(replace(CAMPAIGN.models[0], steps=(0, 1, 2, 3, 4)),),
        tasks=replace(CAMPAIGN.tasks, names=names),
        search=replace(CAMPAIGN.search, budget=6, pending=5, exhaustive=True),
    )

    first, second, rest = coordinate(fast_dir / "r", campaign, monkeypatch)

    assert max(unit.count for unit in first.units) == 2
    assert sum(unit.count for unit in first.units) == 5 * 30
    assert [unit.count for unit in second.units] == [1] * 30
    assert max(unit.count for unit in rest.units) == 4
    assert sum(unit.count for unit in rest.units) == 9 * 30


def test_tasks_of_an_ask_stand_longest_first_once_arms_have_told(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[list[Any]] = []
    found = coordinate(fast_dir / "r", CAMPAIGN, monkeypatch)
    for segment in found:
        lines = dict(zip(segment.order or range(segment.count), segment.items(), strict=True))
        tasks = [json.loads(lines[given])["task"] for given in sorted(lines)]
        orders += [tasks[first : first + 3] for first in range(0, len(tasks), 3)]
    assert orders[:2] == [list(SECONDS)] * 2  # two arms at once, of which nothing is known
    first = found[0]
    for group in range(len(first.groups)):
        kinds = [first.kind_of(unit) for unit in first.units if unit.group == group]
        assert kinds == sorted(kinds), "the longest task of every arm before the next one"
    assert {first.kind_of(unit) for unit in first.units} == {0, 1, 2}
    assert orders[2:] == [["c", "b", "a"]] * 2
