"""The search of a campaign in the report of its run."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.campaign import searchreport
from hpc_toolkit.campaign.search import make_arms
from hpc_toolkit.campaign.searchfigures import expected_best, keys_of, reward_map
from hpc_toolkit.campaign.searchreport import read_search
from hpc_toolkit.campaign.settings import parse_campaign
from hpc_toolkit.report import runreport
from hpc_toolkit.report.page import Cell, Section, as_html, as_markdown
from hpc_toolkit.report.panel import panel
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
REWARDS = "Reward by checkpoint (step) and layer"


def search_of(root: Path) -> Sequence[Section]:
    """The sections of a run's search; all of it could be read."""
    facts = reporting.read_facts(Run.open(root))
    assert facts.problems == []
    return facts.search


def figures(sections: Sequence[Section]) -> dict[str, Figure]:
    return {figure.title: figure for one in sections for figure in one.figures}


def test_a_tile_tells_the_reward_of_its_arm_and_when_it_was_requested(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(fast_dir / "r", toy({**GP, "exhaustive": True}), monkeypatch)
    asked = {pull.arm for one in played.coordinate()[:-1] for pull in one.pulls}

    drawn = ET.fromstring(figures(search_of(played.root))[REWARDS].svg)

    said = [one.text or "" for one in drawn.iter(f"{SVG}title")][1:]
    assert len(said) == 20
    assert {one.partition(":")[0] for one in said if "requested in round" in one} == asked
    rewards = {
        arm: float(rest.split()[0]) for arm, _, rest in (one.partition(": ") for one in said)
    }
    assert max(rewards, key=lambda arm: rewards[arm]) == "m/step16/layer2"
    marks = [one.get("class") for one in drawn.findall(f"{SVG}circle") if one.get("class")]
    assert marks[2:] == ["best", "truth"]  # after the legend


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
    assert re.fullmatch(
        r"After \d+ evaluations the best reward is \d\.\d{4}; it was found after \d+\.",
        drawn["Best reward so far"].alt,
    )
    (table,) = sections[1].tables
    assert table.rows[0][1] == "m/step16/layer2"
    assert len(table.rows) == 20
    priced, *_ = searchreport.sections(Run.open(played.root).view, played.campaign, (36.0, "<EUR>"))
    assert ("cost of the evaluations", "2.64 <EUR>") in priced.facts  # 264 s


def in_order(names: Sequence[str], stderr: float | None, change: float) -> tuple[Campaign, Any]:
    """A search of 6 of 30 arms in 3 rounds, and scores that change by this from arm to arm."""
    search = {"policy": "random", "budget": 6, "pending": 2}
    campaign = arms_campaign([{"x": x} for x in range(30)], search, names=list(names))
    seen: list[int] = []

    def value(item: dict[str, Any]) -> Value:
        seen.extend([item["x"]] if item["x"] not in seen else [])
        found = {"score": 50 + change * seen.index(item["x"]) + 0.01 * len(item["task"])}
        return found if stderr is None else {**found, "stderr": stderr}

    return campaign, value


@pytest.mark.parametrize(
    ("names", "stderr", "change", "says", "then"),
    [
        ("a", None, 0, "As high: 5 other arms; whether more are as good", "return 'stderr'"),
        ("a", 0.1, -1, "no other evaluated arm, judged by the standard errors", "use this arm."),
        ("a", 9.0, -1, "5 other arms, judged by the standard errors", "take the cheapest"),
        (("a", "bb"), None, 0, "5 other arms, judged by the differences", "take the cheapest"),
        (("a", "bb"), 9.0, 1, "by the differences over 2 common tasks", "a larger budget"),
    ],
)
def test_the_first_screen_says_what_was_found_how_sure_it_is_and_what_is_next(
    fast_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str],
    stderr: float | None,
    change: float,
    says: str,
    then: str,
) -> None:
    campaign, value = in_order(names, stderr, change)
    played = Played(fast_dir / "r", campaign, monkeypatch, value)
    played.coordinate()

    first, *_, last = runreport.sections(reporting.read_facts(Run.open(played.root)))

    steps = read_search(Run.open(played.root).view, campaign).steps
    assert steps[-1].evaluations == 6 * len(names)  # the last round is drawn
    found, after = first.paragraphs[:2]
    assert (first.title, found.partition(" is ")[0]) == ("Outcome", "The best arm")
    assert says in found
    assert ("uncertainty unknown" in found) == (stderr is None)
    assert f"Next: {then}" in after
    assert ("still improving" in after) == (change > 0)
    settings = {row[0]: row[1] for row in last.tables[0].rows}
    assert '"policy": "random", "budget": 6, "pending": 2' in settings["search: settings"]


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
        ({"policy": "halving"}, value_of, 2, "goes on"),
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


def test_an_arm_without_a_reward_says_why(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def value(item: dict[str, Any]) -> Value:
        return None if "task" in item and item["layer"] > 1 else value_of(item)

    played = Played(fast_dir / "r", toy(GP), monkeypatch, value)
    assert played.killed(2)  # the last arms that were asked for are not done

    run = Run.open(played.root)
    found = run.status().search
    assert found is not None
    shown = [row.text for row in panel(run.status()) if row.label == "last"]

    whys = {why for _, _, why in found["last"]}
    assert whys == {"", "failed", "not evaluated"}
    assert "(not evaluated)" in shown[0]
    said = figures(search_of(played.root))[REWARDS].svg
    assert "failed, requested in round 1" in said
    assert "not evaluated, requested in round 2" in said


def test_a_race_without_complete_arms_ranks_arms_by_tasks_and_then_by_reward(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(fast_dir / "r", toy(RACE, tasks={"seconds": SECONDS}), monkeypatch)
    played.coordinate()

    sections = search_of(played.root)

    (table,) = sections[1].tables
    assert table.rows[0][1] == "m/step16/layer2"
    assert "their means are not comparable" in table.note
    assert "a random order is not known" in figures(sections)["Best reward so far"].caption


def arms_campaign(rows: list[dict[str, Any]], search: dict[str, Any], **tasks: Any) -> Campaign:
    table = {
        "name": "own",
        "arms": {"rows": rows, "baseline": rows[0]},
        "tasks": {"workload": NOOP, "names": ["a", "b"], **tasks},
        "search": search,
    }
    return parse_campaign(table, "own.toml")


def number_of(item: dict[str, Any]) -> Value:
    """Decided by x, a little by y, and not by z."""
    return {"score": item["x"] + 0.1 * item["y"] + 0.001 * item["z"], "stderr": 0.01}


def test_own_arms_are_drawn_by_their_first_two_keys_with_several_values(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"same": 1, "x": x, "y": y, "z": z, "id": f"{x}{y}{z}"}
        for x in range(3)
        for y in range(4)
        for z in range(2)
    ]
    search = {"policy": "gp-ucb", "budget": 6, "pending": 3, "exhaustive": True}
    played = Played(fast_dir / "r", arms_campaign(rows, search), monkeypatch, number_of)
    played.coordinate()

    sections = search_of(played.root)

    drawn = figures(sections)["Reward by y and x"]
    assert "A tile is the mean of its evaluated arms over z, id." in drawn.caption
    titles = [one.text for one in ET.fromstring(drawn.svg).iter(f"{SVG}title")]
    assert "3, 2: mean 2.3 of 2 of 2 arms" in titles  # the mean of 2.3 and 2.301
    (table,) = sections[1].tables
    columns = ("rank", "reward", "standard error", "tie", "round", "x", "y", "z", "id")
    assert table.columns == (*columns, "tasks", "time")
    first = dict(zip(table.columns, table.rows[0], strict=True))
    assert (first["tie"], first["id"], first["tasks"]) == ("best", "231", Cell("2 of 2", 2))


def test_numbers_are_levels_in_their_order_and_many_are_divided_into_equal_parts() -> None:
    rows = [{"many": place * 0.5, "few": [3, 20, 100, None][place % 4]} for place in range(100)]
    arms = make_arms(arms_campaign(rows, {"policy": "random", "budget": 2}))

    many, few = keys_of(arms)

    assert (many.name, few.name) == ("many", "few")
    assert few.levels == ["3", "20", "100", "(none)"]
    assert [few.level_of[arm] for arm in arms.ids] == [0, 1, 2, 3] * 25
    sizes = [list(many.level_of.values()).count(number) for number in range(len(many.levels))]
    assert len(sizes) == 12
    assert max(sizes) - min(sizes) <= 1
    assert many.levels[0] == "0 to 4"


def test_an_extension_shows_the_evaluations_that_were_known(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"x": x, "y": y, "z": 0} for x in range(4) for y in range(3)]
    first = arms_campaign(rows, {"policy": "gp-ucb", "budget": 5, "pending": 2})
    one = Played(fast_dir / "one", first, monkeypatch, number_of)
    one.coordinate()
    more = {"policy": "gp-ucb", "budget": 8, "pending": 2}
    second = arms_campaign(rows, more, **{"from": str(one.root)})
    two = Played(fast_dir / "two", second, monkeypatch, number_of)
    two.coordinate()

    sections = search_of(two.root)

    assert "Known before: 10 evaluations." in outcome_of(sections)
    first_step = read_search(Run.open(two.root).view, second).steps[0]
    assert first_step[:2] == (0, 0.0)
    drawn = figures(sections)
    assert "known before cost nothing" in drawn["Best reward so far"].caption
    assert drawn["Reward by x and y"].svg.count('class="unknown dim"') == 2  # and in the legend
    assert drawn["Reward by x and y"].alt.startswith(
        "Rewards of 8 of 12 arms; the policy requested 3"
    )
    assert "once all arms are evaluated" in drawn["Best reward so far"].caption
    assert "random order" not in drawn["Best reward so far"].svg


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
    for form in (page, as_markdown("R", sections)):
        assert all(one.isprintable() or one == "\n" for one in form)
    assert page.count("<script>") == 1
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert "<b>k</b>" in parsed.words
    assert [one.findtext(f"{SVG}title") for one in figures_of(page)] == [
        "Best reward so far",
        "Reward by <b>k</b> and y\\u202e",
    ]


def test_long_names_are_shortened(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{x}{'z' * 5_000}{x}", "x": x, "y": x % 3, "z": 0} for x in range(40)]
    search = {"policy": "gp-ucb", "budget": 8, "pending": 8, "exhaustive": True}
    played = Played(fast_dir / "r", arms_campaign(rows, search), monkeypatch, number_of)
    played.coordinate()

    sections = search_of(played.root)

    assert len(as_html("R", sections)) < 100_000
    assert len(as_markdown("R", sections)) < 50_000
    assert "39zzz" in sections[0].paragraphs[0]


def test_damaged_settings_leave_a_sentence_in_the_report(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(fast_dir / "r", toy(GP), monkeypatch)
    played.coordinate()
    (played.root / "campaign.json").write_text('{"search": 3}')

    page = reporting.report_of(Run.open(played.root))

    assert "Not in this report: the search (RunError: " in page
    assert "Settings and versions" in page


def test_pictures_are_bounded_by_tiles_and_not_by_arms() -> None:
    models = [
        {"name": f"m{number}", "layers": 48, "size": 1.0, "steps": list(range(300))}
        for number in range(12)
    ]
    tasks = {"workload": NOOP, "names": ["a"]}
    search = {"policy": "random", "budget": 2}
    campaign = parse_campaign(
        {"name": "large", "models": models, "tasks": tasks, "search": search}, "x"
    )
    arms = make_arms(campaign)
    values = {arm: float(number % 977) for number, arm in enumerate(arms.ids)}

    (drawn,) = reward_map(campaign, arms, values, words=str, asked=values, marks={}, unit="")

    assert len(values) > 170_000
    assert "A tile is the mean of 30 x 1 neighbours" in drawn.caption
    assert len(drawn.svg) < 1_500_000
