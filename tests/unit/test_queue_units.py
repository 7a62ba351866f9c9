"""Units: every item in one of them, in order, never more than a claim may take."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue import units as units_module
from hpc_toolkit.queue.affinity import FreshUnits
from hpc_toolkit.queue.units import MAX_UNIT, Unit, plan_units, runs_of


@st.composite
def groupings(draw: st.DrawFn) -> list[int]:
    """Group index of each item, non-decreasing."""
    sizes = draw(st.lists(st.integers(1, 700), max_size=30))
    return [group for group, size in enumerate(sizes) for _ in range(size)]


@given(groupings())
def test_units_cover_groups_and_never_mix_two(groups: list[int]) -> None:
    units = plan_units(runs_of(groups), len(groups))

    assert [i for first, size in units for i in range(first, first + size)] == list(
        range(len(groups))
    )
    assert all(len(set(groups[first : first + size])) == 1 for first, size in units)
    assert all(1 <= size <= MAX_UNIT for _, size in units)


@given(groupings(), st.integers(1, 4))
def test_many_groups_share_units_whole(groups: list[int], most: int) -> None:
    """A unit is a part of one group, or several whole ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(units_module, "_MAX_GROUP_UNITS", most)
        units = plan_units(runs_of(groups), len(groups))

    assert [i for first, size in units for i in range(first, first + size)] == list(
        range(len(groups))
    )
    for first, size in units:
        assert 1 <= size <= MAX_UNIT
        inside = set(groups[first : first + size])
        if len(inside) > 1:
            assert sum(group in inside for group in groups) == size


def test_units_taper_to_single_items_at_the_end() -> None:
    sizes = [size for _, size in plan_units(None, 100_000)]

    assert sizes[0] == MAX_UNIT
    assert sizes[-20:] == [1] * 20
    assert all(later <= size for size, later in itertools.pairwise(sizes))
    assert len(sizes) < 1000


@pytest.mark.parametrize(("count", "workers"), [(200, 100), (500, 100), (1000, 100), (4000, 100)])
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
