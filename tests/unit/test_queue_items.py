"""Items: what is refused and where it stands, and segments that give back what they were given."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.errors import ItemsError
from hpc_toolkit.queue.items import check_items, encode_segment
from hpc_toolkit.queue.lists import parse_items
from hpc_toolkit.queue.units import Segment

SCALARS = st.none() | st.booleans() | st.integers() | st.text()
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"g": st.sampled_from(["a", "b", "c", 1, None, [1]])}, optional={"x": SCALARS}
    ),
    min_size=1,
    max_size=200,
)


def test_parse_items_skips_blank_lines_and_keeps_the_order() -> None:
    lines = [b'{"a":1}\n', b"\n", b'  {"a":2}\n', b"   \n", b'{"a":3}']

    assert list(parse_items(lines, source="f")) == [{"a": 1}, {"a": 2}, {"a": 3}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": 1', "line 3, column 8: not JSON: Expecting ',' delimiter"),
        (b'{"a":' + b"[" * 200_000, "not JSON"),
        (b"[1]", "not a JSON object but list"),
        (b"null", "not a JSON object but NoneType"),
    ],
)
def test_parse_items_names_the_line_that_is_no_object(line: bytes, problem: str) -> None:
    with pytest.raises(ItemsError, match=r"^list.jsonl, line 3(, column \d+)?: ") as caught:
        list(parse_items([b'{"a":1}\n', b"\n", line], source="list.jsonl"))

    assert problem in caught.value.message
    assert "one object a line" in caught.value.hint


def test_check_items_tells_true_from_one_and_one_from_1_0() -> None:
    check_items([{"a": True}, {"a": 1}, {"a": 1.0}, {"a": "1"}], group_by=None)


_CIRCLE: list[object] = []
_CIRCLE.append(_CIRCLE)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "the list of items is empty"),
        ([{"g": 1, "b": 2}, {"g": 1}, {"b": 2, "g": 1}], r'item 2 is a duplicate: \{"b":2,"g":1\}'),
        ([{"g": 2}, {"g": 0}], "item 1 is a duplicate"),
        ([{"g": 1, "x": math.nan}], "item 0 is not plain JSON: 'x' is nan"),
        ([{"g": 1}, {"g": 2, "x": [math.inf]}], "item 1 is not plain JSON: 'x': Out of range"),
        *(([{"g": value}], "item 0 is not plain JSON: 'g': ") for value in (object(), _CIRCLE)),
        ([{"gg": "a"}], "item 0 has no key 'g'"),
    ],
)
def test_check_items_names_the_item_that_is_refused(items: list[Any], message: str) -> None:
    with pytest.raises(ItemsError, match=message) as caught:
        check_items(items, group_by="g", taken=[{"g": 0}])

    assert caught.value.number == (
        int(found[1]) if (found := re.match(r"item (\d)", message)) else None
    )
    assert ("did you mean 'gg'?" in caught.value.hint) == ("no key" in message)


def written(directory: Path, items: list[dict[str, Any]], **how: Any) -> Segment:
    path = directory / os.urandom(6).hex()
    path.write_bytes(b"".join(encode_segment(items, **how)))
    return Segment(path, 1)


@given(ITEMS, st.sampled_from([None, "g"]))
def test_a_segment_gives_back_its_items_and_their_given_order(
    fast_dir: Path, items: list[dict[str, Any]], group_by: str | None
) -> None:
    segment = written(fast_dir, items, group_by=group_by)

    by_position = [json.loads(line) for line in segment.items()]
    order = segment.order or range(segment.count)

    assert segment.count == len(items)
    assert [by_position[list(order).index(given)] for given in range(len(items))] == items
    by_unit = [json.loads(line) for unit in segment.units for line in segment.lines(unit)]
    assert by_unit == by_position
    for position in range(segment.count):
        assert position in segment.unit_of(position).items


@given(ITEMS)
def test_a_segments_units_hold_one_group_and_name_it(
    fast_dir: Path, items: list[dict[str, Any]]
) -> None:
    segment = written(fast_dir, items, group_by="g")

    for unit in segment.units:
        values = [json.loads(line)["g"] for line in segment.lines(unit)]
        assert values == [segment.group_of(unit)] * unit.count


@given(ITEMS, st.integers(1, 5))
def test_a_segments_units_hold_as_many_items_as_they_may(
    fast_dir: Path, items: list[dict[str, Any]], unit_size: int
) -> None:
    segment = written(fast_dir, items, group_by="g", unit_size=unit_size)

    assert json.loads(segment.path.read_bytes().split(b"\n")[0])["unit_size"] == unit_size
    assert all(1 <= unit.count <= unit_size for unit in segment.units)
    assert sum(unit.count for unit in segment.units) == len(items)


@given(ITEMS, st.sampled_from([None, "g"]), st.integers(1, 5))
def test_items_of_one_kind_stand_together_in_their_group_the_first_kind_first(
    fast_dir: Path, items: list[dict[str, Any]], group_by: str | None, unit_size: int
) -> None:
    kinds = [str(item.get("x")) for item in items]
    segment = written(fast_dir, items, group_by=group_by, unit_size=unit_size, kinds=kinds)

    order = segment.order or range(segment.count)
    assert [items[given] for given in order] == [json.loads(line) for line in segment.items()]
    first_seen = list(dict.fromkeys(kinds))
    numbers = [first_seen.index(kinds[given]) for given in order]
    assert [segment.kind_of(unit) for unit in segment.units] == [
        numbers[unit.first] for unit in segment.units
    ]
    groups = [segment.unit_of(position).group for position in range(segment.count)]
    places = list(zip(groups, numbers, order, strict=True))
    assert places == sorted(places)


def test_a_segment_without_kinds_is_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(
        b'{"format":1,"count":4,"unit_size":256,"group_by":"g","groups":["a","b"],'
        b'"units":[[0,1,0,0],[1,2,10,0],[3,1,30,1]],"order":[0,2,3,1]}\n'
        b'{"g":"a"}\n{"g":"a"}\n{"g":"a"}\n{"g":"b"}\n'
    )
    segment = Segment(path, 1)

    assert [segment.kind_of(unit) for unit in segment.units] == [0, 0, 0]
    assert [len(segment.lines(unit)) for unit in segment.units] == [1, 2, 1]


@pytest.mark.parametrize(
    ("kinds", "said"),
    [
        ([0], "it has 1 kinds of 2 items"),
        (["a", "b"], "not a list of numbers"),
        ([True, 0], "not a list of numbers"),
        ({"0": 1, "1": 2}, "not a list of numbers"),
        ("01", "not a list of numbers"),
    ],
)
def test_a_segment_whose_kinds_are_damaged_is_refused(
    tmp_path: Path, kinds: object, said: str
) -> None:
    first, *lines = encode_segment([{"a": 1}, {"a": 2}], group_by=None, kinds="xy")
    path = tmp_path / "s"
    header = {**json.loads(first), "kinds": kinds}
    path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(lines))

    with pytest.raises((LookupError, TypeError), match=said):
        Segment(path, 1)
