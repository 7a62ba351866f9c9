"""Settings of campaigns, and decisions in the headers of segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit import Observation, Pull
from hpc_toolkit.campaign.decisions import SEARCH, Decision, Decisions, read_decisions
from hpc_toolkit.cli.campaigns import make_campaign_run, resume_campaign
from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.items import encode_segment
from hpc_toolkit.queue.units import Segment
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import NOOP, Play, campaign_of, toy

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
