"""How the coordinator cuts asks, and in which order the tasks of an arm stand: longest first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hpc_toolkit.campaign.coordinator
from hpc_toolkit.campaign.coordinator import Coordinator
from hpc_toolkit.campaign.settings import Campaign
from hpc_toolkit.engines.localcampaign import make_campaign_run
from hpc_toolkit.queue.items import Segment
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import SECONDS, toy, work

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
