"""What a campaign's summary and the report of its run say of the search."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.campaign.searchfigures import expected_best
from hpc_toolkit.campaign.settings import Campaign, parse_campaign
from hpc_toolkit.campaign.summary import Found, Summary, summary_lines
from hpc_toolkit.cli.gathering import read_facts
from hpc_toolkit.report.figures import Figure
from hpc_toolkit.report.page import Section, as_html
from hpc_toolkit.run import Run
from tests.hostile import HOSTILE
from tests.unit.playedcampaign import NOOP, SECONDS, Play, Value, score, toy, value_of
from tests.unit.test_report import SVG, Page, assert_texts_are_inside, figures_of

ARMS = [
    (f"{model}/step{step}", layer)
    for model, steps in (("s", (0, 4, 16)), ("m", (4, 16)))
    for step in steps
    for layer in range(4)
]
EACH_S = sum(SECONDS.values())


def outcome(play: Play, campaign: Campaign, *value: Any) -> Summary:
    played = play(campaign, *value)
    played.coordinate()
    return played.summary()


def best_of(found: Summary) -> Found:
    assert found.best is not None
    return found.best


def mean(arm: tuple[str, int]) -> float:
    scores = [score({"checkpoint": arm[0], "layer": arm[1], "task": t}) for t in SECONDS]
    return sum(scores) / len(scores)


def test_summary_of_a_search_by_arms(play: Play) -> None:
    search = {"policy": "gp-ucb", "budget": 6, "pending": 3, "exhaustive": True}
    found = outcome(play, toy(search))
    best = max(ARMS, key=mean)

    assert (found.evaluated, found.arms) == (6, 20)
    assert (found.evaluations, found.all_evaluations) == (18, 60)
    assert found.gpu_s == 6 * EACH_S
    assert found.exhaustive_gpu_s == 20 * EACH_S
    assert found.exhaustive is not None
    assert found.exhaustive.arm == f"{best[0]}/layer{best[1]}"
    assert found.verified == found.best
    assert found.tasks == ["a", "b", "c"]
    assert found.baseline is not None
    assert found.baseline.arm == "m/step16/layer3"
    assert found.ended == "requested 6 arms, the budget is 6"
    assert len(found.sequence) == 6
    lines = "\n".join(summary_lines(found))
    assert "gp-ucb: 6 of 20 arms, 18 of 60 evaluations\n  ended         requested 6" in lines
    assert "with 30% of the evaluations and 30% of their time" in lines
    assert "rewards" not in lines
    assert " over " not in lines


def test_summary_of_a_race_is_of_the_tasks_that_it_needed(play: Play) -> None:
    seconds = {"seconds": SECONDS}
    search = {"policy": "racing", "options": {"first": 2, "c": 0.0}}
    found = outcome(play, toy(search, tasks=seconds))

    assert found.tasks == ["a", "b"]
    assert (found.evaluated, found.evaluations) == (20, 40)
    assert found.gpu_s == 20 * 3.0
    assert best_of(found).arm == "m/step16/layer2"
    # Over the same two tasks, though nothing was evaluated on all.
    assert found.baseline is not None
    parts = [score({"checkpoint": "m/step16", "layer": 3, "task": task}) for task in "ab"]
    assert found.baseline.reward == sum(parts) / 2
    assert found.exhaustive is None
    assert found.ended == "the policy requested nothing more"
    assert "layer2  1.2" in summary_lines(found)[2]
    assert summary_lines(found)[2].endswith(" over 2 of 3 tasks")


def test_what_a_race_found_is_compared_with_all_arms_over_all_tasks(play: Play) -> None:
    def last_task_turns_it(item: dict[str, Any]) -> Value:
        other = item.get("task") == "c" and (item["checkpoint"], item["layer"]) == ("s/step0", 0)
        return {"score": 9.0} if other else value_of(item)

    search = {"policy": "racing", "options": {"first": 2, "c": 0.0}, "exhaustive": True}
    campaign = toy(search, tasks={"seconds": SECONDS})
    found = outcome(play, campaign, last_task_turns_it)

    assert best_of(found).arm == "m/step16/layer2"
    assert found.verified is not None
    assert found.verified.arm == best_of(found).arm
    assert abs(found.verified.reward - mean(("m/step16", 2))) < 1e-12
    assert best_of(found).reward != found.verified.reward
    assert found.exhaustive is not None
    assert found.exhaustive.arm == "s/step0/layer0"
    behind = found.exhaustive.reward - found.verified.reward
    lines = "\n".join(summary_lines(found))
    assert f"{behind:.4f} behind it" in lines
    assert "found an arm that noise cannot tell from it with 67% of the evaluations" in lines
    assert "and 9% of their time" in lines


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (math.nan, "value is nan"),
        ({"score": math.nan}, "score is nan"),
        ({"score": np.float32("-inf")}, "score is -inf"),
    ],
)
def test_a_score_of_nan_fails_its_evaluation_and_the_search_goes_on(
    fast_dir: Path, play: Play, bad: Value, said: str
) -> None:
    def value(item: dict[str, Any]) -> Value:
        if "task" not in item:
            return value_of(item)
        return bad if item["layer"] == 1 and item["task"] == "b" else score(item)

    search = {"policy": "gp-ucb", "budget": 20, "pending": 5}

    found = outcome(play, toy(search), value)

    assert (found.evaluations, found.failed_tasks) == (60, 5)
    assert found.failure is not None
    assert found.failure.endswith(f"on b: {said}")
    assert {row["attempts"] for row in Run.open(fast_dir / "r").table()} == {1}


GP = {"policy": "gp-ucb", "budget": 8, "pending": 4}


def search_of(root: Path) -> Sequence[Section]:
    """The sections of a run's search; all of it could be read."""
    facts = read_facts(Run.open(root))
    assert facts.problems == []
    return facts.search


def figures(sections: Sequence[Section]) -> dict[str, Figure]:
    return {figure.title: figure for one in sections for figure in one.figures}


@given(
    rewards=st.lists(
        st.sampled_from([0.1, 0.5, 0.7, 2.0]) | st.floats(-9, 9), min_size=1, max_size=7
    )
)
def test_the_random_order_is_the_mean_over_all_draws(rewards: list[float]) -> None:
    counts = list(range(1, len(rewards) + 1))

    for drawn, found in zip(counts, expected_best(rewards, counts), strict=True):
        best = [max(some) for some in combinations(rewards, drawn)]
        assert found == pytest.approx(math.fsum(best) / len(best))


def outcome_of(sections: Sequence[Section]) -> str:
    return " ".join(sections[0].paragraphs)


def test_the_outcome_compares_the_best_arm_with_the_baseline_and_with_all_arms(play: Play) -> None:
    played = play(toy({**GP, "exhaustive": True}))
    played.coordinate()

    sections = search_of(played.root)

    said = outcome_of(sections)
    best = "The best arm is s/step16/layer2: reward 1.2070 ± 0.0058 (mean over tasks)."
    assert said.startswith(f"{best} Perhaps as good: no other evaluated arm, judged by the diff")
    assert "gp-ucb used 24 of the 60 possible evaluations (40%, 40% of their time)." in said
    assert "above the best last layer, m/step16/layer3 (" in said
    truth = (
        "All 20 arms were evaluated: the best is m/step16/layer2 (1.2188 ± 0.0058), 0.0118 better"
    )
    assert truth in said
    assert "which is within the noise" in said
    assert "The search ended: requested 8 arms, the budget is 8." in said
    drawn = figures(sections)
    assert "random order is exact" in drawn["Best reward so far"].caption
    assert "random order" in drawn["Best reward so far"].svg
    assert re.search(
        r">After \d+ evaluations the best reward is \d\.\d{4}; it was found after \d+\.<",
        drawn["Best reward so far"].svg,
    )
    (table,) = sections[1].tables
    assert table.rows[0][1] == "m/step16/layer2"
    assert len(table.rows) == 20


def some_fail(item: dict[str, Any]) -> Value:
    return None if item.get("task") == "b" and item["layer"] == 2 else value_of(item)


def all_fail(item: dict[str, Any]) -> Value:
    return None if "task" in item else value_of(item)


RACE = {"policy": "racing", "options": {"first": 2, "c": 0.0}}


@pytest.mark.parametrize(
    ("search", "value", "after", "says"),
    [
        (GP, value_of, 1, "No arm has a reward yet."),
        (GP, some_fail, None, "The search ended"),
        (GP, all_fail, None, "No arm has a reward."),
        ({**GP, "asks": "window"}, value_of, 2, "The search goes on."),
        (RACE, value_of, None, ", 2 of 3 tasks"),
    ],
)
def test_every_search_has_sections(
    play: Play,
    search: dict[str, Any],
    value: Any,
    after: int | None,
    says: str,
) -> None:
    campaign = toy(search, tasks={"seconds": SECONDS})
    played = play(campaign, value)
    if after is None:
        played.coordinate()
    else:
        assert played.killed(after)

    sections = search_of(played.root)

    assert says in outcome_of(sections)
    page = as_html("R", sections)
    assert Page(page).open == []
    assert "nan" not in page.partition("<script>")[0]
    for one in figures_of(page):
        assert_texts_are_inside(one)


def arms_campaign(rows: list[dict[str, Any]], search: dict[str, Any], **tasks: Any) -> Campaign:
    table = {
        "name": "own",
        "arms": {"rows": rows, "baseline": rows[0]},
        "tasks": {"workload": NOOP, "names": ["a", "b"], **tasks},
        "search": search,
    }
    return parse_campaign(table, "own.toml")


def test_hostile_names_are_shown_as_text(play: Play) -> None:
    texts = [
        "<script>alert(1)</script>",
        "</svg><img src=x onerror=alert(1)>",
        "\x1b[31m",
        *HOSTILE,
    ]
    names = list(dict.fromkeys(text.encode(errors="replace").decode() for text in texts))
    rows = [{"<b>k</b>": name, "y\u202e": y} for name in names[:70] for y in range(2)]
    search = {"policy": "random", "budget": 9, "pending": 9, "exhaustive": True}

    def value(item: dict[str, Any]) -> Value:
        return {"score": len(item["<b>k</b>"]) + item["y\u202e"]}

    played = play(arms_campaign(rows, search), value)
    played.coordinate()

    sections = search_of(played.root)

    page = as_html("R", sections)
    assert all(one.isprintable() or one == "\n" for one in page)
    assert page.count("<script>") == 1
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert "<b>k</b>" in parsed.words
    assert [one.findtext(f"{SVG}title") for one in figures_of(page)] == [
        "Best reward so far",
        "Reward by <b>k</b> and y\\u202e",
    ]
