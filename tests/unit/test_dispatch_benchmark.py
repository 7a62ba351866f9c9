"""The benchmark that drains a search's rounds with the queue's own code."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit.bench.comparison import Entrant
from hpc_toolkit.bandit.bench.replay import Asks, replay
from hpc_toolkit.bandit.bench.synthetic import score_table

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ASKS = Asks("rounds", 4)


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("dispatch")


def test_every_evaluation_of_a_search_is_an_item_of_its_round(dispatch: Any) -> None:
    scores = score_table(0, 5)
    trace = replay(scores, Entrant.parse("random").make(scores, 1, ASKS), ASKS, pulls=10)

    scenarios = list(dispatch.rounds(trace, 3, 2.0))

    assert [sum(len(group.items_s) for group in one.groups) for one in scenarios] == [20, 20, 10]
    seconds = sum(math.fsum(group.items_s) for one in scenarios for group in one.groups)
    assert seconds == pytest.approx(trace.gpu_s[-1])
    assert {one.unit_size for one in scenarios} == {1}


def test_a_later_round_lists_the_tasks_that_took_longest_first(dispatch: Any) -> None:
    scores = score_table(0, 5)
    trace = replay(scores, Entrant.parse("random").make(scores, 1, ASKS), ASKS, pulls=8)

    first, second = dispatch.rounds(trace, 3, 0.0)

    assert first.groups[0].kinds[:5] == scores.tasks.names
    assert scores.seconds is not None
    means = scores.seconds[list(trace.arms[:4])].mean(axis=0)
    longest = sorted(range(5), key=lambda task: -means[task])
    assert second.groups[0].kinds[:5] == tuple(scores.tasks.names[task] for task in longest)
