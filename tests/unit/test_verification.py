"""Whether results are complete, and what is said where they are not."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.results.snapshots import read_rows
from hpc_toolkit.results.verification import Range, verify

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
