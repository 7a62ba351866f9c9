"""The benchmark of the metrics: its answers are hit, its loops compute the same."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.metrics import METRICS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def test_every_known_answer_is_found(part: Any) -> None:
    answers = list(part("metricanswers").known_answers())

    assert len(answers) >= 20
    for metric, what, _, value, found in answers:
        assert found == pytest.approx(value, abs=1e-12), f"{metric}: {what}"


def test_loops_of_every_metric_give_its_values(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = part("metrics_table")
    for name, size in {"LAYERS": 2, "TOKENS": 6, "FEATURES": 12, "VIEWS": 3}.items():
        monkeypatch.setattr(benchmark, name, size)

    seen = set()
    for name, ours, loops in benchmark.ways(prompts=25):
        seen.add(name)
        assert ours(1) == pytest.approx(loops(1), rel=1e-9, abs=1e-12), name

    assert seen == set(METRICS)


def test_time_is_told_for_each_metric_and_for_all(
    part: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark = part("metrics_table")
    ways = [("slow", lambda layer: layer + 1.0, math.exp)]
    monkeypatch.setattr(benchmark, "ways", lambda prompts: ways)

    rows = benchmark.timing_rows(1, 2)

    assert [row[0] for row in rows] == ["slow", "all"]
    # The values of the last layer, 7 and exp 6, are what differs most.
    assert float(rows[0][4]) == pytest.approx(1 - 7 / math.exp(6), abs=0.1)
