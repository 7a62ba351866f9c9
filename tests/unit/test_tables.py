"""Rows to files that others read."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.results.tables import columns_of, write_table, writer_for

if TYPE_CHECKING:
    from pathlib import Path


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


ROWS = [
    row({"id": 0, "name": "a,b"}, {"score": 0.25, "tags": ["x"]}),
    row({"id": 1, "name": "ü"}, None),
    row({"id": 2}, {"score": 3, "note": None}),
]


def test_npz_has_nan_or_no_text_for_what_is_not_there_and_needs_no_pickle(
    tmp_path: Path,
) -> None:
    write_table(tmp_path / "t.npz", ROWS)

    with np.load(tmp_path / "t.npz", allow_pickle=False) as found:
        assert found["value.score"].dtype == np.float64
        np.testing.assert_array_equal(found["value.score"], [0.25, np.nan, 3.0])
        assert found["name"].tolist() == ["a,b", "ü", ""]


@pytest.mark.parametrize(
    ("values", "kind", "kept"),
    [
        ([2**53 + 1, -(2**63)], "int64", None),
        ([2**64 - 1, 0], "uint64", None),
        ([2**53 + 1, None], "str", ["9007199254740993", ""]),
        ([2**53 + 1, 0.5], "str", ["9007199254740993", "0.5"]),
        ([2**64 - 1, -1], "str", ["18446744073709551615", "-1"]),
        ([2**53, 0.5], "float64", None),
        ([3, 0.5, True], "float64", [3.0, 0.5, 1.0]),
        ([True, False], "bool", None),
        ([True, 2], "float64", [1.0, 2.0]),
        ([10**400, 1], "str", [f"1{400 * '0'}", "1"]),
    ],
)
def test_npz_keeps_every_number(
    tmp_path: Path, values: list[Any], kind: str, kept: list[Any] | None
) -> None:
    write_table(tmp_path / "t.npz", [row({"id": at}, {"x": x}) for at, x in enumerate(values)])

    with np.load(tmp_path / "t.npz", allow_pickle=False) as found:
        assert found["value.x"].dtype.name.startswith(kind)
        assert found["value.x"].tolist() == (kept or values)
        assert found["id"].dtype == np.int64


@pytest.mark.parametrize("key", ["file", "a/b"])
def test_an_items_key_may_have_any_name(tmp_path: Path, key: str) -> None:
    write_table(tmp_path / "t.npz", [row({key: "text"}, {key: 1.5})])

    with np.load(tmp_path / "t.npz", allow_pickle=False) as found:
        assert found[key].tolist() == ["text"]
        assert found[f"value.{key}"].tolist() == [1.5]


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
