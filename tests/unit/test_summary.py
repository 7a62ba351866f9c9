"""What a campaign's summary says, and its lines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpc_toolkit.campaign.summary import Summary, summarize
from hpc_toolkit.cli.campaigns import summary_lines
from hpc_toolkit.run import Run
from tests.unit.playedcampaign import SECONDS, Played, Value, score, toy, value_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.campaign.evaluations import Found
    from hpc_toolkit.campaign.settings import Campaign

ARMS = [
    (f"{model}/step{step}", layer)
    for model, steps in (("s", (0, 4, 16)), ("m", (4, 16)))
    for step in steps
    for layer in range(4)
]
EACH_S = sum(SECONDS.values())


def outcome(
    root: Path,
    campaign: Campaign,
    patch: pytest.MonkeyPatch,
    value: Callable[[dict[str, Any]], Value] = value_of,
) -> Summary:
    Played(root, campaign, patch, value).coordinate()
    found = summarize(Run.open(root).view, campaign)
    assert found is not None
    return found


def best_of(found: Summary) -> Found:
    assert found.best is not None
    return found.best


def mean(arm: tuple[str, int]) -> float:
    scores = [score({"checkpoint": arm[0], "layer": arm[1], "task": t}) for t in SECONDS]
    return sum(scores) / len(scores)


def test_summary_of_a_search_by_arms(fast_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search = {"policy": "gp-ucb", "budget": 6, "pending": 3, "exhaustive": True}
    found = outcome(fast_dir / "r", toy(search), monkeypatch)
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


def test_summary_of_a_race_is_of_the_tasks_that_it_needed(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"seconds": SECONDS}
    search = {"policy": "racing", "options": {"first": 2, "c": 0.0}}
    found = outcome(fast_dir / "r", toy(search, tasks=seconds), monkeypatch)

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


def test_what_a_race_found_is_compared_with_all_arms_over_all_tasks(
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_task_turns_it(item: dict[str, Any]) -> Value:
        other = item.get("task") == "c" and (item["checkpoint"], item["layer"]) == ("s/step0", 0)
        return {"score": 9.0} if other else value_of(item)

    search = {"policy": "racing", "options": {"first": 2, "c": 0.0}, "exhaustive": True}
    campaign = toy(search, tasks={"seconds": SECONDS})
    found = outcome(fast_dir / "r", campaign, monkeypatch, last_task_turns_it)

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
    fast_dir: Path, monkeypatch: pytest.MonkeyPatch, bad: Value, said: str
) -> None:
    def value(item: dict[str, Any]) -> Value:
        if "task" not in item:
            return value_of(item)
        return bad if item["layer"] == 1 and item["task"] == "b" else score(item)

    search = {"policy": "gp-ucb", "budget": 20, "pending": 5}

    found = outcome(fast_dir / "r", toy(search), monkeypatch, value)

    assert (found.evaluations, found.failed_tasks) == (60, 5)
    assert found.failure is not None
    assert found.failure.endswith(f"on b: {said}")
    assert {row["attempts"] for row in Run.open(fast_dir / "r").table()} == {1}
