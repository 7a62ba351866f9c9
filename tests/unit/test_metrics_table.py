"""The benchmark of the metrics: its answers are hit, its loops compute the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.science.metrics import METRICS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def test_every_known_answer_is_found(part: Any) -> None:
    answers = list(part("metricanswers").known_answers())

    assert len(answers) >= 17
    for metric, what, _, value, found in answers:
        assert found == pytest.approx(value, abs=1e-12), f"{metric}: {what}"


@pytest.mark.slow  # importing scikit-learn takes seconds
def test_metrics_agree_with_every_piece_of_independent_code(part: Any) -> None:
    rows = part("metricanswers").agreement_rows(2)

    code = {row[1] for row in rows}
    assert {"slow loops", "torch cross_entropy"} <= code
    assert {row[2] for row in rows} == {"1", "2"}
    assert max(float(row[3]) for row in rows) < 1e-11


def test_loops_of_every_metric_give_its_values(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = part("metrics_table")
    for name, size in {"LAYERS": 2, "TOKENS": 6, "VIEWS": 3}.items():
        monkeypatch.setattr(benchmark, name, size)

    seen = set()
    for name, ours, loops in benchmark.ways(prompts=25, features=12):
        seen.add(name)
        assert ours(1) == pytest.approx(loops(1), rel=1e-9, abs=1e-12), name

    assert seen == set(METRICS)
