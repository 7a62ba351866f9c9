"""Lists of items that are not JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ConfigError, HpcToolkitError, ItemsError
from hpc_toolkit.queue.lists import MOST_ITEMS, counted, grid, read_list
from hpc_toolkit.system.quantities import parse_range

if TYPE_CHECKING:
    from pathlib import Path


def test_a_count_is_the_numbers_below_it() -> None:
    assert list(counted(3, "seed")) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


def test_a_grid_is_all_combinations_and_its_last_name_varies_fastest() -> None:
    assert list(grid(["lr=0.1, 1e-3", "seed=0:4:2,9"])) == [
        {"lr": lr, "seed": seed} for lr in (0.1, 0.001) for seed in (0, 2, 4, 9)
    ]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("-1:1", [-1, 0, 1]),
        ("true,null,-2.5", [True, None, -2.5]),
        ("007,NaN,a:b,1:b,[1],7e12345", ["007", "NaN", "a:b", "1:b", "[1]", "7e12345"]),
        ('"quoted"', ['"quoted"']),
    ],
)
def test_a_value_is_a_number_only_in_the_notation_of_json(text: str, values: list[Any]) -> None:
    assert [item["x"] for item in grid([f"x={text}"])] == values


@given(st.integers(-50, 50), st.integers(0, 50), st.integers(1, 9))
def test_a_range_includes_its_last_number(first: int, more: int, stride: int) -> None:
    numbers = parse_range(f"{first}:{first + more * stride}:{stride}", where="x")

    assert (numbers[0], numbers[-1], len(numbers)) == (first, first + more * stride, more + 1)
    assert list(parse_range(str(first), where="x")) == [first]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: counted(0, "x"), "--count: 0 items"),
        (lambda: counted(MOST_ITEMS + 1, "x"), "--count: 10000001 items"),
        (lambda: grid(["x"]), "'x' is not NAME=VALUES"),
        (lambda: grid(["=1"]), "'=1' is not NAME=VALUES"),
        (lambda: grid(["x=1", "x=2"]), "x is given twice"),
        (lambda: grid(["x=1,,2"]), "--grid x: a value is empty"),
        (lambda: grid(["x=3:1"]), "--grid x '3:1': 1 is before 3"),
        (lambda: grid(["x=1:3:0"]), "the stride is 0"),
        (lambda: grid(["x=0:999999999999"]), "has 1000000000000 values"),
        (lambda: grid(["x=0:9999", "y=0:9999"]), "--grid: 100000000 combinations"),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()

    assert message in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("l.csv", '\ufeffx,y\r\n1,"a, b"\r\n\r\n2.5,007\r\n'),
        ("l.json", '[{"x": 1, "y": "a, b"},\n {"x": 2.5, "y": "007"}]'),
        ("l.jsonl", '{"x": 1, "y": "a, b"}\n\n{"x": 2.5, "y": "007"}\n'),
        ("list", '{"x": 1, "y": "a, b"}\n{"x": 2.5, "y": "007"}\n'),
    ],
)
def test_a_list_is_read_by_the_suffix_of_its_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")

    assert read_list(tmp_path / name) == [{"x": 1, "y": "a, b"}, {"x": 2.5, "y": "007"}]


def test_a_list_in_parquet_is_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"x": [1, 2], "y": ["a", None]}), tmp_path / "l.parquet")

    assert read_list(tmp_path / "l.parquet") == [{"x": 1, "y": "a"}, {"x": 2, "y": None}]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ItemsError, match=r"bad.parquet: not Parquet"):
        read_list(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", b"x,x\n1,2\n", "line 1: column names must be unique"),
        ("l.csv", b"x,\n1,2\n", "line 1: column names must be unique"),
        ("l.csv", b"", "line 1: column names must be unique"),
        ("l.csv", b"x,y\n1,2\n1,2,3\n", "line 3: 3 cells for 2 columns"),
        ("l.csv", b'x\n"a\n', "line 2: unexpected end of data"),
        ("l.csv", b"x\n\xff\n", "line 2: not UTF-8: invalid start byte"),
        ("l.json", b'[{"x": 1},\n{"x" 2}]', "line 2: not JSON: Expecting ':' delimiter"),
        ("l.json", b'{"x": 1}\n{"x": 2}', "line 2: not JSON: Extra data"),
        ("l.json", b"[1]", "not an array of objects"),
        ("l.json", b'[{"x": NaN}]', "not JSON: NaN is not JSON"),
    ],
)
def test_a_damaged_list_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(HpcToolkitError) as caught:
        read_list(tmp_path / name)

    assert message in caught.value.message
    assert caught.value.message.startswith(str(tmp_path / name))
