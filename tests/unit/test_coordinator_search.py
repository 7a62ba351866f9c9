"""Asks of a campaign: their sequence, in rounds and over a window, killed and gone on with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit import Pull
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.decisions import Decision
from hpc_toolkit.campaign.search import make_arms, metric_columns, policy_of
from hpc_toolkit.campaign.settings import Campaign
from hpc_toolkit.campaign.summary import searched_of, summarize
from hpc_toolkit.cli.campaigns import resume_campaign
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import SECONDS, Play, Value, toy, value_of, work

ALL = tuple(SECONDS)
FAMILIES: dict[str, dict[str, Any]] = {
    "rounds": {"policy": "gp-ucb", "budget": 9, "pending": 3},
    "window": {"policy": "gp-ucb", "budget": 9, "pending": 3, "asks": "window"},
    "racing": {"policy": "racing", "options": {"first": 2}, "exhaustive": True},
    "metrics": {
        "policy": "gp-ucb",
        "budget": 8,
        "pending": 2,
        "metrics": ["entropy", "rank"],
        "options": {"features": "all", "initial": 3},
    },
    "evaluations": {"policy": "gp-ei", "evaluations": 20, "pending": 2, "asks": "window"},
    "hours": {"policy": "random", "gpu_hours": 0.1, "pending": 3},
    "all": {"policy": "random", "evaluations": 1000, "pending": 2, "asks": "window"},
}


def made(name: str) -> Campaign:
    return toy(FAMILIES[name])


def asks(decisions: Sequence[Decision]) -> list[tuple[str, tuple[Pull, ...], tuple[str, ...]]]:
    """What is the same however a campaign went."""
    return [
        (one.why, one.pulls, tuple(json.dumps(tell.to_json()) for tell in one.tells))
        for one in decisions
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_sequence_is_the_same_wherever_the_coordinator_is_killed_and_nothing_is_asked_twice(
    name: str, play: Play
) -> None:
    calm = play(made(name), name="calm").coordinate()
    killed = play(made(name), name="killed")
    times = 0
    while killed.killed(1):
        times += 1

    assert times > 0
    assert asks(killed.decisions()) == asks(calm)
    assert len(calm) > 1
    assert Run.open(killed.root).status().complete
    asked = [(pull.arm, t) for one in calm for pull in one.pulls for t in pull.tasks or ALL]
    rows = Run.open(killed.root).results(stage="tasks")
    assert sorted((arm_of(row["item"]), row["item"]["task"]) for row in rows) == sorted(asked)
    assert len(set(asked)) == len(asked)
    if FAMILIES[name].get("exhaustive"):
        assert len(asked) == 20 * 3


def test_search_whose_first_results_have_no_score_stops_and_names_their_keys(play: Play) -> None:
    played = play(made("rounds"), lambda _item: {"acc": 0.5, "loss": 1.0})

    for _ in range(2):
        with pytest.raises(RunError, match="have no key 'score', but acc, loss"):
            played.coordinate()

    assert [len(one.pulls) for one in played.decisions()] == [3]


@pytest.mark.parametrize(
    ("more", "initial"),
    [
        *(({"pending": 8}, 8), ({"pending": 3}, 5), ({"pending": 8, "asks": "window"}, 5)),
        ({"pending": 8, "options": {"initial": 2}}, 2),
    ],
)
def test_opening_of_a_policy_is_a_whole_round(more: dict[str, Any], initial: int) -> None:
    campaign = toy({"policy": "gp-ucb", "budget": 9, **more})

    assert asdict(policy_of(campaign, make_arms(campaign)).rule)["initial"] == initial


def test_window_asks_for_one_when_the_oldest_is_told(play: Play) -> None:
    decisions = play(made("window")).coordinate()

    assert [len(one.pulls) for one in decisions] == [3] + [1] * 6
    order = [pull.arm for one in decisions for pull in one.pulls]
    told = [tell.arm for one in decisions for tell in one.tells]
    assert told == order[: len(told)]
    assert [len(one.tells) for one in decisions] == [0] + [1] * 6


def test_metrics_of_the_first_decision_stay_when_a_retry_adds_some(play: Play) -> None:
    """Features that come later would give other asks than those that are recorded."""

    def gaps(item: dict[str, Any]) -> Value:
        broken = "task" not in item and item["checkpoint"] == "m/step16"
        return None if broken else value_of(item)

    calm = play(made("metrics"), gaps, name="calm").coordinate()
    lifted = play(made("metrics"), gaps, name="lifted")
    assert lifted.killed(3)
    so_far = len(lifted.decisions())
    assert 0 < so_far < len(calm)
    assert Run.open(lifted.root).retry() == 4
    work(lifted.root)

    assert asks(lifted.coordinate()) == asks(calm)
    columns = calm[0].metrics
    assert columns is not None
    assert columns["rank"].count(None) == 4
    assert [one.metrics for one in calm[1:]] == [None] * (len(calm) - 1)
    # With the metrics that are there now, the search would be another one.
    assert asks(play(made("metrics"), name="whole").coordinate()) != asks(calm)


def test_a_metric_that_most_arms_lack_is_refused_and_not_left_out() -> None:
    campaign = made("metrics")
    rows = [
        {"item": arm.item(), "value": {"entropy": 0.5, "rank": 1.0 if place < 9 else None}}
        for place, arm in enumerate(campaign.arms())
    ]

    with pytest.raises(ConfigError, match=r"search\.metrics: only 9 of 20 arms have 'rank'"):
        metric_columns(campaign, rows)

    rows[9]["value"]["rank"] = 2.0
    assert metric_columns(campaign, rows)["rank"] == [1.0] * 9 + [2.0] + [None] * 10


def test_a_restart_takes_recorded_asks_from_the_log_even_if_the_policy_would_ask_otherwise(
    play: Play,
) -> None:
    campaign = toy(FAMILIES["racing"], tasks={"seconds": SECONDS})
    played = play(campaign)
    assert played.killed(2)
    before = played.decisions()
    other = toy(FAMILIES["racing"], tasks={"seconds": {"a": 30.0, "b": 2.0, "c": 1.0}})

    after = played.coordinate(other)

    assert after[: len(before)] == before
    assert len(after) > len(before)


def test_a_search_goes_on_as_it_was_begun_whatever_the_settings_say(play: Play) -> None:
    """Settings may be replaced in the moment in which the first decision is made."""
    calm = play(made("rounds"), name="calm").coordinate()
    played = play(made("rounds"))
    assert played.killed(2)
    run = Run.open(played.root)

    assert asks(played.coordinate(made("window"))) == asks(calm)
    with pytest.raises(ConfigError, match=r"other settings: search\.asks"):
        resume_campaign(run, made("window"), update=True)
    resume_campaign(run, made("rounds"), update=False)
    assert summarize(searched_of(run.view, made("racing"))) is not None, "settings that say no end"
    found = summarize(searched_of(run.view, made("window")))
    assert found is not None
    assert found.ended == "requested 9 arms, the budget is 9"


def test_tasks_of_an_ask_stand_longest_first_once_arms_have_told(
    fast_dir: Path, play: Play
) -> None:
    campaign = toy(
        {"policy": "gp-ucb", "budget": 4, "pending": 2, "asks": "window"},
        models=[{"name": "s", "layers": 2, "size": 1000, "steps": [0, 1]}],
    )
    play(campaign).coordinate()
    view = Run.open(fast_dir / "r").view
    view.poll()
    orders: list[list[Any]] = []

    first, *others = view.stages["tasks"].log.segments.values()
    for segment in (first, *others):
        lines = dict(zip(segment.order or range(segment.count), segment.items(), strict=True))
        tasks = [json.loads(lines[given])["task"] for given in sorted(lines)]
        orders += [tasks[at : at + 3] for at in range(0, len(tasks), 3)]
    assert orders[:2] == [list(SECONDS)] * 2  # two arms at once, of which nothing is known
    for group in range(len(first.groups)):
        kinds = [first.kind_of(unit) for unit in first.units if unit.group == group]
        assert kinds == sorted(kinds), "the longest task of every arm before the next one"
    assert {first.kind_of(unit) for unit in first.units} == {0, 1, 2}
    assert orders[2:] == [["c", "b", "a"]] * 2
