"""Whether results are complete, and what is said where they are not."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.results.snapshots import read_rows
from hpc_toolkit.results.verification import Problem, Range, recompute, verify
from hpc_toolkit.rundir.layout import StageSpec, WorkloadSpec

if TYPE_CHECKING:
    from pathlib import Path

ITEMS: list[dict[str, Any]] = [
    {"seed": seed, "name": f"n{seed}", "at": [seed]} for seed in range(4)
]


def row(seed: int, **changes: Any) -> dict[str, Any]:
    """A done row."""
    return {
        "item": ITEMS[seed],
        "state": "done",
        "value": {"mean": 0.25 * seed, "deep": {"steps": [1.0, seed]}},
        "error": None,
        "attempts": 1,
        "seconds": 0.5,
        "worker": "w",
        **changes,
    }


def found(rows: list[dict[str, Any]], **how: Any) -> list[tuple[str, Any, str]]:
    """Kind, seed and text of what is wrong."""
    items = how.pop("items", ITEMS)
    problems = verify(rows, items, **how)
    return [(one.kind, one.item["seed"], one.what) for one in problems]


def test_a_row_that_is_missing_twice_there_or_of_no_item_is_named() -> None:
    rows = [row(0), row(1), row(1), row(1), row(2, item={"seed": 9})]

    assert found(rows) == [
        ("missing", 2, ""),
        ("missing", 3, ""),
        ("unexpected", 9, ""),
        ("duplicate", 1, "3 rows"),
    ]
    assert found(rows, items=None) == [("duplicate", 1, "3 rows")]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("mean=0:0.5", "mean is 0.75, not in 0:0.5"),
        ("mean=:0.5", "mean is 0.75, not in -inf:0.5"),
        ("deep.steps=0:1", "deep.steps is [1.0, 3]"),
        ("none=0:1", "none is null"),
    ],
)
def test_a_number_outside_its_range_is_named(text: str, what: str) -> None:
    assert found([row(3)], items=None, ranges=(Range.parse(text),)) == [("out of range", 3, what)]


def test_numbers_that_are_not_finite_are_named_wherever_they_stand() -> None:
    rows = [row(0, value={"a": [1.0, math.nan], "b": {"c": -math.inf}, "d": True, "e": None})]

    assert found(rows, items=None) == [
        ("not finite", 0, "value.a[1] is nan"),
        ("not finite", 0, "value.b.c is -inf"),
    ]


def test_keys_that_repeat_are_named_in_items_and_in_values() -> None:
    rows = [row(0, value={"id": 7}), row(1, value={"id": 8}), row(2, value={"id": 7}), row(3)]

    assert found(rows, unique=("id",)) == [
        ("not unique", 2, f"id is 7 as in {json.dumps(ITEMS[0])}"),
        ("not unique", 3, "there is no id"),
    ]
    assert found([row(1), row(1)], items=None, unique=("seed",))[1][0] == "not unique"


@pytest.mark.parametrize(
    ("name", "text", "error", "match"),
    [
        ("rows.csv", "", ConfigError, "results are a run, a snapshot in .json, or rows in .jsonl"),
        ("rows.jsonl", "{}\n", RunError, "holds no gathered rows: row 1: it has no 'item'"),
        ("rows.jsonl", "{\n", RunError, "holds no gathered rows"),
        ("none.jsonl", None, RunError, "holds no gathered rows: No such file"),
    ],
)
def test_a_file_of_something_else_is_refused(
    name: str, text: str | None, error: type[Exception], match: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)

    with pytest.raises(error, match=match):
        read_rows(tmp_path / name)


CODE = """
import random

def value(item):
    if item["seed"] == 2:
        raise OSError("gone")
    return {"mean": 0.25 * item["seed"], "deep": {"steps": [1.0, item["seed"]]}}

def noisy(item):
    return {**value(item), "deep": {"steps": [1.0 + 1e-6, item["seed"]], "time": random.random()}}

"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of workloads."""
    (tmp_path / "code_of_verification.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "code_of_verification", raising=False)
    return "code_of_verification"


def stage(function: str, **changes: Any) -> StageSpec:
    return StageSpec(name="items", workload=WorkloadSpec(function=function), **changes)


def test_results_that_come_out_otherwise_are_named(code: str) -> None:
    rows = [row(0, value={"mean": 0.5}), row(1), row(2)]

    again, problems = recompute(stage(f"{code}:value"), rows, count=3)

    assert again == 3
    found = {one.item["seed"]: one.what for one in problems}
    assert found == {
        0: 'value.mean was 0.5, is 0.0; value.deep was null, is {"steps": [1.0, 0]}',
        2: "fails now: OSError: gone",
    }
    assert {one.kind for one in problems} == {"recomputed"}


def test_the_tolerance_and_the_keys_to_ignore_decide_what_is_the_same(code: str) -> None:
    function, rows = stage(f"{code}:noisy"), [row(1)]

    def problems(**how: Any) -> list[Problem]:
        return recompute(function, rows, count=1, **how)[1]

    assert "value.deep.time" in problems(tolerance=1e-5)[0].what
    assert "value.deep.steps[0]" in problems(ignore=("time",))[0].what
    assert problems(tolerance=1e-5, ignore=("time",)) == []
