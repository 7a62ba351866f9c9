"""Rows to files that others read."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.tables import columns_of, write_table, writer_for


def row(item: dict[str, Any], value: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    return {
        "item": item,
        "state": "done" if value is not None else "failed",
        "value": value,
        "error": None if value is not None else 'ValueError: x,\n"y"',
        "attempts": 1,
        "seconds": 0.5,
        "worker": "w",
        **changes,
    }


def test_a_column_means_the_same_in_all_rows(tmp_path: Path) -> None:
    rows = [row({"id": 0}, {"a": 1}), row({"id": 1, "state": "Ohio", "value.a": 5}, {"a": 2})]
    write_table(tmp_path / "t.csv", rows)

    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        head, *found = csv.reader(file)
    assert head == [
        *("id", "state", "value.a"),
        *("hpctk.state", "error", "attempts", "seconds", "worker", "hpctk.value.a"),
    ]
    assert [(one[1], one[2], one[3], one[-1]) for one in found] == [
        ("", "", "done", "1"),
        ("Ohio", "5", "done", "2"),
    ]


def test_numbers_that_are_not_finite_are_text_beside_text_in_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    words = {"nan": "nan", "inf": "inf", "text": "x", "none": None}
    types = {"nan": {"/a": "nan"}, "inf": {"/a": "numpy.float32 inf"}}
    rows = [
        row({"id": word}, {"a": value if word == "text" else None})
        | ({"types": types[word]} if word in types else {})
        for word, value in words.items()
    ]

    write_table(tmp_path / "t.parquet", rows)

    found = pq.read_table(tmp_path / "t.parquet")
    assert found["value.a"].to_pylist() == [*words.values()]


def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown format") as caught:
        writer_for(tmp_path / "t.jsnl")

    assert "jsonl" in caught.value.hint


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"function": "f", "args": [1], "stored": {"same": {}}}, ["function", "args"]),
        # Keys of the same names in a user's list are columns like others.
        ({"function": "f", "args": 1, "stored": 2}, ["function", "args", "stored"]),
        (
            {"function": "f", "args": [], "stored": {"same": 1}, "lr": 2},
            ["function", "args", "stored", "lr"],
        ),
        ({"stored": {"at": 1}}, ["stored"]),
    ],
)
def test_only_the_part_of_a_call_that_its_executor_reads_is_no_column(
    item: dict[str, Any], names: list[str]
) -> None:
    found = [*columns_of([row(item, {"score": 1})])]

    assert found[: len(names) + 1] == [*names, "state"]
