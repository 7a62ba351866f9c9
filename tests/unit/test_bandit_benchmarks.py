"""The benchmarks of policies: what they count, on scores of which the answer is known."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.bandit.bench.synthetic import score_table

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = argparse.Namespace(
    policies="random,racing,gp-ucb", seeds=2, subtables=2, part_seeds=1, races=3, made_up=1
)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bandit_bench")


def rows_of(lines: list[str]) -> list[list[str]]:
    """The cells of a table's rows."""
    found = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return found[2:]


@pytest.mark.parametrize("part", ["pulls", "races", "wall"])
def test_a_part_has_a_full_row_for_everything_that_it_compares(bench: Any, part: str) -> None:
    first = {
        "pulls": ["random", "gp-ucb", "gp-ucb, rounds:8", "gp-ucb, window:8"],
        "races": [*["racing"] * 3, *["halving"] * 3],
        "wall": [*(f"gp-ucb, {way}" for way in bench.WAYS), "racing, whole rungs"],
    }

    rows = rows_of(getattr(bench, part)(score_table(0, 25), OPTIONS))

    assert [row[0] for row in rows] == first[part]
    assert len({len(row) for row in rows}) == 1
    assert all(re.search(r"\d|never", cell) for row in rows for cell in row[1:])


@pytest.mark.slow
def test_a_step_is_measured_where_dask_is_not_installed() -> None:
    script = [sys.executable, str(BENCHMARKS / "bandit_step.py"), "--peer-python", sys.executable]

    ended = subprocess.run(
        [*script, "--steps", "3", "--rounds", "1", "--submitit-steps", "0"],
        capture_output=True,
        text=True,
        check=True,
    )

    rows = rows_of(ended.stdout.splitlines())
    assert [row[:2] for row in rows] == [
        ["this project, gp-ucb", "3"],
        ["gp-ucb alone: ask, tell", "3"],
    ]
    assert float(rows[0][2].removesuffix(" ms").replace(",", "")) > 0
