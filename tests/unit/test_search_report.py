"""The search of a campaign in the report of its run."""

from __future__ import annotations

import math
import re
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.campaign import searchreport
from hpc_toolkit.campaign.searchfigures import expected_best
from hpc_toolkit.campaign.settings import parse_campaign
from hpc_toolkit.report.page import Section, as_html
from hpc_toolkit.run import Run
from hpc_toolkit.submit import reporting
from tests.hostile import HOSTILE
from tests.unit.playedcampaign import NOOP, SECONDS, Played, Value, toy, value_of
from tests.unit.test_report import SVG, Page, assert_texts_are_inside, figures_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.report.figures import Figure

GP = {"policy": "gp-ucb", "budget": 8, "pending": 4}


def search_of(root: Path) -> Sequence[Section]:
    """The sections of a run's search; all of it could be read."""
    facts = reporting.read_facts(Run.open(root))
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


def test_the_outcome_compares_the_best_arm_with_the_baseline_and_with_all_arms(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(fast_dir / "r", toy({**GP, "exhaustive": True}), monkeypatch)
    played.waits_s = 60.0
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
    priced, *_ = searchreport.sections(Run.open(played.root).view, played.campaign, (36.0, "<EUR>"))
    assert ("cost of the evaluations", "2.64 <EUR>") in priced.facts  # 264 s


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
    fast_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    search: dict[str, Any],
    value: Any,
    after: int | None,
    says: str,
) -> None:
    campaign = toy(search, tasks={"seconds": SECONDS})
    played = Played(fast_dir / "r", campaign, monkeypatch, value)
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


def test_hostile_names_are_shown_as_text(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

    played = Played(fast_dir / "r", arms_campaign(rows, search), monkeypatch, value)
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
