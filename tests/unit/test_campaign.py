"""Settings of campaigns, their decisions, and asks: in rounds or a window, killed and resumed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit import Observation, Pull
from hpc_toolkit.campaign.coordinator import arm_of
from hpc_toolkit.campaign.decisions import SEARCH, Decision, Decisions, read_decisions
from hpc_toolkit.campaign.search import make_arms, metric_columns, policy_of
from hpc_toolkit.campaign.settings import Campaign
from hpc_toolkit.campaign.summary import searched_of, summarize
from hpc_toolkit.cli.campaigns import make_campaign_run, resume_campaign
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import NOOP, SECONDS, Play, Value, campaign_of, toy, value_of, work

BUDGET = {"budget": 6, "pending": 2}


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"a": 1, "b": 1}, "tasks: seconds: the task 'c' is missing"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, "tasks: seconds: unknown task 'd'"),
        ({"a": 1, "b": 1, "c": 0}, r"tasks: seconds\.c: 0 is not a positive number"),
        ({"a": 1, "b": 1, "c": 10**400}, r"tasks: seconds\.c: 1000.* is not a posit"),
        ({"a": 1, "b": 1, "c": 1e-320}, r"tasks: seconds\.c: 1e-320 is not a posit"),
        ([1], "tasks: seconds: .* is not a table"),
    ],
)
def test_tables_by_task_must_name_each_task_and_no_other(seconds: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"toy.toml: {says}"):
        toy(BUDGET, tasks={"seconds": seconds})


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ({}, "search: no budget is set"),
        ({"policy": "random"}, "search: no budget is set"),
        ({"budget": 0}, "search: budget: 0 is not a whole number"),
        ({"budget": 21}, "search.budget: 21, but there are 20 arms"),
        ({"evaluations": 2.5}, "search: evaluations: 2.5 is not a whole number from 1"),
        ({"evaluations": True}, "search: evaluations: True is not"),
        ({"gpu_hours": 0}, "search: gpu_hours: 0 is not a positive number of hours"),
        ({"gpu_hours": float("inf")}, "search: gpu_hours: inf is not"),
        ({"gpu_hours": "1"}, "search: gpu_hours: '1' has no unit"),
        ({"gpu_hours": "soon"}, "search: gpu_hours: 'soon' is not a duration"),
        ({**BUDGET, "asks": "round"}, "search: asks: 'round'"),
        ({**BUDGET, "metrics": ["a", "a"]}, r"search: metrics: \['a', 'a'\] is not a list of diff"),
        ({**BUDGET, "budgett": 1}, "search: unknown key 'budgett'"),
        ({**BUDGET, "exhaustive": 1}, "search: exhaustive: 1 is not true or false"),
        ({**BUDGET, "options": {"seed": 1}}, "search: options.seed: not an option of a policy"),
    ],
)
def test_search_tables_that_are_wrong_are_refused_by_key(search: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"toy.toml: {says}"):
        toy(search)


@pytest.mark.parametrize(
    ("search", "says"),
    [
        ({**BUDGET, "policy": "gp-uct"}, "search: unknown policy 'gp-uct'"),
        ({"budget": 6, "policy": "x", "asks": "window"}, "search: unknown policy 'x'"),
        ({**BUDGET, "options": {"bet": 2}}, "search: policy 'gp-ucb' has no option 'bet'"),
        ({**BUDGET, "options": {"beta": "x"}}, "search: gp-ucb: beta is 'x'"),
        ({**BUDGET, "options": {"features": "metrics"}}, "search: the arms have no metri"),
        ({**BUDGET, "metrics": ["entropy"]}, "search: metrics: nothing uses them"),
    ],
)
def test_searches_that_cannot_work_are_refused_before_anything_runs(
    search: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"toy.toml: {says}"):
        make_campaign_run(tmp_path / "r", toy(search), "toy.toml")
    assert not (tmp_path / "r").exists()


def test_settings_survive_json(tmp_path: Path) -> None:
    search: dict[str, Any] = {"policy": "gp-ei", "evaluations": 30, "gpu_hours": 2}
    search |= {"pending": 3, "asks": "window", "metrics": ["entropy"]}
    search["options"] = {"features": "all"}
    campaign = toy(search, tasks={"seconds": {"a": 1.0, "b": 2.0, "c": 3.0}})

    run = make_campaign_run(tmp_path / "r", campaign)

    assert campaign_of(Run.open(run.root)) == campaign


METRIC = {"metrics": ["entropi"], "options": {"features": "all", "initial": 2}}


def test_search_may_change_until_its_first_decision(play: Play) -> None:
    """A slip that is found after the metrics were measured does not cost them."""
    played = play(toy({**BUDGET, **METRIC}))
    with pytest.raises(ConfigError, match=r"search\.metrics: no arm has a metric 'entropi'") as one:
        played.coordinate()
    assert "did you mean 'entropy'?" in str(one.value.hint)
    run = Run.open(played.root)
    fixed = toy({**BUDGET, **METRIC, "metrics": ["entropy"]})

    with pytest.raises(ConfigError, match=r"other settings: search\.metrics\s") as refused:
        resume_campaign(run, fixed, update=False)
    assert refused.value.hint == "--update takes it over"
    with pytest.raises(ConfigError, match=r"toy.toml: search: .* no option 'x'"):
        resume_campaign(run, toy({**BUDGET, "options": {"x": 1}}), update=True, file="toy.toml")
    resume_campaign(run, fixed, update=True)

    assert campaign_of(Run.open(played.root)) == fixed.with_pending()
    assert len(played.coordinate(campaign_of(run))) == 3


def test_what_ends_a_search_may_change_while_it_goes_on_and_nothing_else(play: Play) -> None:
    played = play(toy(BUDGET))
    assert played.killed(2)
    run = Run.open(played.root)
    longer = toy({"budget": 8, "pending": 2, "gpu_hours": 5})

    with pytest.raises(ConfigError, match=r"settings: search\.pending") as refused:
        resume_campaign(run, toy({**BUDGET, "pending": 3}), update=True)
    assert str(refused.value.hint).startswith(
        "only search.budget, search.evaluations, search.gpu_hours can change now"
    )
    resume_campaign(run, longer, update=True)

    assert len(played.coordinate(campaign_of(run))) == 4
    with pytest.raises(ConfigError, match=r"settings: search\.budget") as over:
        resume_campaign(run, toy(BUDGET), update=True)
    assert str(over.value.hint).startswith("the search is over")


def test_other_settings_never_change(tmp_path: Path) -> None:
    run = make_campaign_run(tmp_path / "r", toy(BUDGET))

    other = toy(BUDGET, seed=4, metrics={"workload": NOOP, "max_attempts": 2})
    with pytest.raises(
        ConfigError, match=r"other settings: metrics\.max_attempts, seed\s"
    ) as refused:
        resume_campaign(run, other, update=True)
    assert str(refused.value.hint).startswith("only search.* can change now")


TELL = Observation("x", scores={"a": 0.5}, seconds={"a": 2.0}, failed=("b",))


def segment(path: Path, decision: dict[str, Any] | None) -> Segment:
    path.write_bytes(b"".join(encode_segment([{"task": "a"}], group_by=None, decision=decision)))
    return Segment(path, 1)


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    whole = Decision(why=SEARCH, number=1, pulls=(Pull("x"), Pull("y")))
    metrics: dict[str, list[float | None]] = {"entropy": [0.5, None]}
    pulls = (Pull("x", ("c",)), Pull("z"))
    parts = Decision(why=SEARCH, number=2, pulls=pulls, tells=(TELL,), metrics=metrics)
    written = [segment(tmp_path / str(n), one.to_json()) for n, one in enumerate([whole, parts])]

    assert read_decisions([segment(tmp_path / "2", None), *written]) == [whole, parts]
    assert "tasks" not in whole.to_json()
    assert parts.to_json()["tasks"] == [["c"], []]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(({"arms": one}, "'arms' of its decision is ") for one in (None, [1])),
        ({"tells": {}}, "'tells' of its decision is {}"),
        ({"tasks": [["a"], ["b"]]}, "tasks of 2 pulls for 1 arms"),
        ({"tasks": []}, "tasks of 0 pulls for 1 arms"),
        ({"tasks": ["a"]}, "'tasks' of its decision is"),
        ({"number": None}, "'number' of its decision is None"),
        *(({"metrics": one}, "'metrics' of its decision is") for one in ([1], {"m": ["1"]})),
        *(({"tells": [one]}, "a tell .*: not an observation") for one in (3, {"arm": "x"})),
        ({"tells": [{**TELL.to_json(), "scores": {"a": "b"}}]}, "a tell of its decision: arm 'x'"),
    ],
)
def test_damaged_decisions_are_refused_with_their_file(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    decision = {"why": SEARCH, "number": 1, "arms": ["x"], "tells": [], **change}

    with pytest.raises(RunError, match=f"000007.jsonl is damaged: line 1: .*{says}"):
        read_decisions([segment(tmp_path / "000007.jsonl", decision)])


def test_what_waits_is_what_was_asked_and_not_told() -> None:
    decisions = Decisions()
    decisions.take(Decision(why=SEARCH, number=1, pulls=(Pull("x", ("a",)), Pull("y"))))
    decisions.told.append(TELL)
    decisions.take(Decision(why=SEARCH, number=2, pulls=(Pull("x", ("c",)),)))

    assert decisions.waiting == [Pull("y"), Pull("x", ("c",))]
    assert decisions.numbers == {Pull("x", ("a",)): 1, Pull("y"): 1, Pull("x", ("c",)): 2}


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
