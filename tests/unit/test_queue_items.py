"""Items: what is refused, the segments that hold them, and the units that are claimed."""

from __future__ import annotations

import heapq
import itertools
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
from hpc_toolkit.queue import units as units_module
from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.items import check_items, encode_segment
from hpc_toolkit.queue.lists import parse_items
from hpc_toolkit.queue.units import MAX_UNIT, Segment, Unit, plan_units, runs_of

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


@given(ITEMS, st.sampled_from([None, "g"]), st.sampled_from([1, 2, 3, 5, MAX_UNIT]))
def test_a_segment_gives_back_its_items_and_their_given_order_in_units_of_one_group(
    fast_dir: Path, items: list[dict[str, Any]], group_by: str | None, unit_size: int
) -> None:
    segment = written(fast_dir, items, group_by=group_by, unit_size=unit_size)

    by_position = [json.loads(line) for line in segment.items()]
    order = segment.order or range(segment.count)

    assert segment.count == len(items)
    assert [by_position[list(order).index(given)] for given in range(len(items))] == items
    by_unit = [json.loads(line) for unit in segment.units for line in segment.lines(unit)]
    assert by_unit == by_position
    for position in range(segment.count):
        assert position in segment.unit_of(position).items
    for unit in segment.units:
        values = [json.loads(line)["g"] for line in segment.lines(unit)]
        assert group_by is None or values == [segment.group_of(unit)] * unit.count
        assert 1 <= unit.count <= unit_size
    assert json.loads(segment.path.read_bytes().split(b"\n")[0])["unit_size"] == unit_size


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


@st.composite
def groupings(draw: st.DrawFn) -> list[int]:
    """Group index of each item, non-decreasing."""
    sizes = draw(st.lists(st.integers(1, 700), max_size=30))
    return [group for group, size in enumerate(sizes) for _ in range(size)]


@given(groupings(), st.sampled_from([None, 1, 2, 3, 4]))
def test_units_cover_groups_and_only_many_groups_share_units_whole(
    groups: list[int], most: int | None
) -> None:
    """A unit is a part of one group, or several whole ones."""
    with pytest.MonkeyPatch.context() as patch:
        if most is not None:
            patch.setattr(units_module, "_MAX_GROUP_UNITS", most)
        units = plan_units(runs_of(groups), len(groups))

    assert [i for first, size in units for i in range(first, first + size)] == list(
        range(len(groups))
    )
    for first, size in units:
        assert 1 <= size <= MAX_UNIT
        inside = set(groups[first : first + size])
        if len(inside) > 1:
            assert most is not None
            assert sum(group in inside for group in groups) == size


def test_units_taper_to_single_items_at_the_end() -> None:
    sizes = [size for _, size in plan_units(None, 100_000)]

    assert sizes[0] == MAX_UNIT
    assert sizes[-20:] == [1] * 20
    assert all(later <= size for size, later in itertools.pairwise(sizes))
    assert len(sizes) < 1000


@pytest.mark.parametrize(("count", "workers"), [(200, 100), (4000, 100)])
@pytest.mark.parametrize("ranks", [True, False])
def test_long_items_of_a_short_list_end_after_the_least_number_of_rounds(
    count: int, workers: int, *, ranks: bool
) -> None:
    """If all items take 1 s; ranks of one step begin with their own share of the units."""
    units = [Unit(1, first, size, -1) for first, size in plan_units(None, count)]
    fresh = [FreshUnits(str(r), r if ranks else 0, workers if ranks else 1) for r in range(workers)]
    for one in fresh:
        one.add(units, lambda _: None)
    claimed: set[str] = set()
    free = [(0, rank) for rank in range(workers)]
    rounds = 0
    while free:
        at, rank = heapq.heappop(free)
        while (unit := fresh[rank].choose(None, lambda _: 1.0)) and unit.name in claimed:
            fresh[rank].prune(lambda unit: unit.name in claimed)  # as after a lost race
        rounds = max(rounds, at)
        if unit is not None:
            claimed.add(unit.name)
            heapq.heappush(free, (at + unit.count, rank))

    assert rounds == -(-count // workers)


@given(st.integers(1, 3000), st.integers(1, MAX_UNIT))
def test_a_given_number_of_items_per_claim_is_the_size_of_all_units_but_the_last(
    count: int, size: int
) -> None:
    *sizes, last = [n for _, n in plan_units(None, count, unit_size=size, taper=False)]

    assert set(sizes) <= {size}
    assert last == count - size * len(sizes)
    assert 1 <= last <= size


def test_a_given_number_of_items_per_claim_ends_at_the_border_of_a_group() -> None:
    groups = [0] * 5 + [1] * 4

    units = plan_units(runs_of(groups), 9, unit_size=2, taper=False)

    assert units == [(0, 2), (2, 2), (4, 1), (5, 2), (7, 2)]


def test_a_million_items_and_a_million_groups_stay_few_units() -> None:
    assert len(plan_units(None, 1_000_000)) < 5_000
    assert len(plan_units(runs_of(range(100_000)), 100_000)) <= 8_300


def test_13_groups_a_worker_are_claimed_one_by_one_up_to_600_workers() -> None:
    """Several in one claim would leave workers idle at the end."""
    groups = [group for group in range(13 * 600) for _ in range(6)]

    assert max(size for _, size in plan_units(runs_of(groups), len(groups))) == 6


@pytest.mark.parametrize("count", [8200, 12_288, 20_000, 55_296])
def test_thousands_of_workers_end_together_when_units_hold_several_groups(count: int) -> None:
    """Groups of equal length, begun in their order by 4,096 workers as they become free."""
    groups = [group for group in range(count) for _ in range(12)]
    loads = [0] * 4096

    units = plan_units(runs_of(groups), len(groups))
    for _, size in units:
        heapq.heapreplace(loads, loads[0] + size)

    assert max(loads) <= 1.05 * 12 * math.ceil(count / 4096)
    assert len(units) < 9000
