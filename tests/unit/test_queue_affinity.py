"""Which unit next, and what was learned of how long items take."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.queue.affinity import Durations, FreshUnits, group_key
from hpc_toolkit.queue.units import Unit

GROUPS = ["a", "b", "c"]


def units_in(*groups: int, count: int = 1) -> list[Unit]:
    return [Unit(1, index * count, count, group) for index, group in enumerate(groups)]


def by_group(unit: Unit) -> str | None:
    return json.dumps(GROUPS[unit.group]) if unit.group >= 0 else None


def seconds(**known: float) -> Callable[[str], float]:
    return lambda key: known.get(json.loads(key), 1.0)


@given(st.lists(st.integers(-1, 2), max_size=60), st.text(max_size=3))
def test_every_unit_is_chosen_once(groups: list[int], seed: str) -> None:
    fresh = FreshUnits(seed)
    units = units_in(*groups)
    fresh.add(units, by_group)

    chosen = []
    while (unit := fresh.choose(None, seconds())) is not None:
        chosen.append(unit)

    assert sorted(unit.first for unit in chosen) == list(range(len(units)))


def test_the_longest_group_that_nobody_began_comes_next() -> None:
    fresh = FreshUnits("seed")
    fresh.add(units_in(0, 0, 0, 1, 2, 2), by_group)

    unit = fresh.choose('"gone"', seconds(a=1.0, b=100.0, c=2.0))

    assert unit is not None
    assert unit.group == 1


def test_the_group_with_most_left_is_helped_when_all_are_begun() -> None:
    fresh = FreshUnits("seed")
    units = units_in(0, 0, 1, 1, 1, 1)
    fresh.add(units, by_group)
    claimed = {units[0], units[2]}
    fresh.prune(lambda unit: unit in claimed)

    unit = fresh.choose(None, seconds())

    assert unit is not None
    assert unit.group == 1


def test_groups_that_others_began_are_helped_with_the_earliest_kind() -> None:
    """However much is left of another one, whose long tasks are begun already."""
    fresh = FreshUnits("seed")
    units = units_in(0, 0, 0, 0, 0, 1, 1)
    kinds = dict(zip(units, [0, 1, 1, 1, 1, 0, 0], strict=True))
    fresh.add(units, by_group)
    fresh.prune(lambda unit: unit in (units[0], units[5]))

    chosen = [fresh.choose(None, seconds(), kinds.__getitem__) for _ in range(2)]

    assert chosen == [units[6], units[1]]


def test_units_without_groups_come_nearly_in_order() -> None:
    fresh = FreshUnits("seed")
    fresh.add(units_in(*[-1] * 200), by_group)

    chosen = [unit.first for _ in range(200) if (unit := fresh.choose(None, seconds())) is not None]
    rest = chosen[:1] + chosen[10:]

    assert max(place - index for index, place in enumerate(rest)) <= 16 + 10
    assert chosen != sorted(chosen), "workers that start together must not race for each name"


@pytest.mark.parametrize("ranks", [True, False])
def test_the_first_units_without_groups_are_from_the_whole_list(*, ranks: bool) -> None:
    """Forecasts need to know how long the items at the end of a sorted list take."""
    units = units_in(*[-1] * 400)
    fresh = [FreshUnits(f"w{r}", r if ranks else 0, 4 if ranks else 1) for r in range(4)]
    for one in fresh:
        one.add(units, by_group)

    chosen = [
        unit.first for _ in range(5) for one in fresh if (unit := one.choose(None, seconds()))
    ]

    assert {place // 100 for place in chosen} == {0, 1, 2, 3}
    assert min(chosen) < 16
    assert fresh[0].choose(None, seconds()) is not None


def test_what_was_added_later_is_no_sample_and_many_workers_claim_few() -> None:
    later = [Unit(2, place, 1, -1) for place in range(400)]
    fresh = FreshUnits("w")
    fresh.add([*units_in(*[-1] * 40), *later], by_group)
    found = [fresh.choose(None, seconds()) for _ in range(20)]
    assert all(unit is not None and unit.entry == 1 for unit in found)

    many = [FreshUnits(f"w{rank}", rank, 100) for rank in range(100)]
    for one in many:
        one.add(units_in(*[-1] * 400), by_group)
    chosen = [unit.first for one in many if (unit := one.choose(None, seconds())) is not None]
    assert sum(place >= 100 for place in chosen) <= 10


def test_a_groups_key_does_not_depend_on_the_order_of_its_keys() -> None:
    assert group_key({"a": 1, "b": 2}) == group_key({"b": 2, "a": 1})
    assert group_key("1") != group_key(1)
    assert group_key(None) is None


def test_durations_of_a_new_group_are_those_of_groups_that_differ_in_the_last_number() -> None:
    """Other checkpoints of the same model take as long; other models do not."""
    durations = Durations()
    durations.add('"pythia-70m/step1000"', 2, 4.0)
    durations.add('"pythia-70m/step2000"', 1, 5.0)
    durations.add('"pythia-1b/step1000"', 1, 60.0)

    assert durations.seconds_of('"pythia-70m/step143000"') == 3.0
    assert durations.seconds_of('"pythia-70m/step1000"') == 2.0
    assert durations.seconds_of('"pythia-1b/step0"') == 60.0
    assert durations.seconds_of('"opt-1b/step0"') == 69.0 / 4


def test_groups_of_which_nothing_is_known_come_first_and_among_them_the_larger() -> None:
    durations = Durations()
    assert durations.precedence('"a1"') == durations.precedence('"b1"') > 0
    durations.add('"a1"', 1, 60.0)

    assert durations.precedence('"b1"') > 1e6 * durations.precedence('"a2"')
    assert durations.precedence('"b1"') == durations.precedence('"c1"')
    durations.add('"b1"', 1, 1.0)
    assert durations.precedence('"b2"') == 1.0


def test_durations_are_of_the_group_else_of_all_else_unknown() -> None:
    durations = Durations()
    assert (durations.seconds_of("a"), durations.known) == (1.0, False)

    durations.add("a", 4, 8.0)
    durations.add("b", 1, 7.0)
    durations.add("b", 0, 100.0)

    assert durations.known
    assert durations.seconds_of("a") == 2.0
    assert durations.seconds_of("b") == 7.0
    assert durations.seconds_of("c") == 3.0
    assert durations.seconds_of(None) == 3.0


def test_workers_of_one_job_begin_with_different_units_and_help_each_other_then() -> None:
    units = [Unit(1, first, 1, -1) for first in range(20)]

    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, lambda _unit: None)
        chosen = []
        while (unit := fresh.choose(None, lambda _: 1.0)) is not None:
            chosen.append(unit)

        assert chosen[:5] == units[rank::4]
        assert set(chosen) == set(units)


def all_own(count: int) -> tuple[list[Unit], Callable[[Unit], str | None]]:
    """Units of so many groups, two each."""
    units = [Unit(1, first, 1, first // 2) for first in range(2 * count)]
    return units, lambda unit: f'"g{unit.group}"'


@given(st.lists(st.integers(1, 3), min_size=1, max_size=8), st.text(max_size=3))
def test_the_group_ahead_is_the_one_that_is_begun_next(weights: list[int], seed: str) -> None:
    units, key_of = all_own(len(weights))
    fresh = FreshUnits(seed)
    fresh.add(units, key_of)
    by_key = {f'"g{group}"': float(weight) for group, weight in enumerate(weights)}
    loaded: str | None = None
    told: str | None = None

    while (unit := fresh.choose(loaded, by_key.__getitem__)) is not None:
        if key_of(unit) != loaded:
            assert loaded is None or told == key_of(unit)
            loaded = key_of(unit)
        told = fresh.next_group(loaded, by_key.__getitem__)
        assert told != loaded

    assert told is None


def test_workers_of_one_job_begin_with_groups_of_their_own_and_have_others_ahead() -> None:
    units, key_of = all_own(8)
    begun, ahead = [], []

    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, key_of)
        unit = fresh.choose(None, lambda _: 1.0)
        assert unit is not None
        begun.append(key_of(unit))
        ahead.append(fresh.next_group(begun[-1], lambda _: 1.0))

    assert len({*begun, *ahead}) == 8


def test_nothing_is_ahead_once_all_groups_of_ones_own_are_begun() -> None:
    units, key_of = all_own(4)
    fresh = FreshUnits("w", 1, 2)
    fresh.add(units, key_of)

    assert fresh.next_group('"g1"', seconds(g2=5.0)) == '"g3"'
    fresh.prune(lambda unit: unit.group == 3)
    assert fresh.next_group('"g1"', seconds()) is None
    assert fresh.next_group('"g0"', seconds()) == '"g1"'


def test_a_group_ahead_that_another_worker_began_is_given_up_for_another() -> None:
    units, key_of = all_own(3)
    fresh = FreshUnits("w")
    fresh.add(units, key_of)
    first = fresh.next_group('"g0"', seconds())
    assert first in ('"g1"', '"g2"')

    fresh.prune(lambda unit: key_of(unit) == first and unit.first % 2 == 0)

    second = fresh.next_group('"g0"', seconds())
    assert {first, second} == {'"g1"', '"g2"'}


def test_a_group_ahead_is_kept_though_another_is_known_to_take_longer_since() -> None:
    """It is on its way to this node."""
    units, key_of = all_own(9)
    fresh = FreshUnits("w")
    fresh.add(units, key_of)
    ahead = fresh.next_group('"g0"', seconds())
    fresh.prune(lambda unit: unit.group == 0)

    longer = {f"g{group}": float(f'"g{group}"' != ahead) + 1.0 for group in range(9)}
    unit = fresh.choose('"g0"', seconds(**longer))

    assert unit is not None
    assert key_of(unit) == ahead


def test_ranks_begin_with_shares_of_equal_work_though_lengths_and_models_alternate() -> None:
    """One of the long groups and one of each model for each rank, in whatever order they come."""
    names = [f"{model}-{step}" for step in range(4) for model in ("a", "b")]
    counts = [6 if name.startswith("a") else 2 for name in names]
    units = [Unit(1, 10 * n, count, n) for n, count in enumerate(counts)]

    def key_of(unit: Unit) -> str:
        return json.dumps(names[unit.group])

    begun = []
    for rank in range(4):
        fresh = FreshUnits(f"w{rank}", rank, 4)
        fresh.add(units, key_of)
        chosen = [fresh.choose(None, lambda _: 1.0) for _ in range(2)]
        begun.append([names[unit.group] for unit in chosen if unit is not None])

    assert sorted(first for first, _ in begun) == ["a-0", "a-1", "a-2", "a-3"]
    assert sorted(second for _, second in begun) == ["b-0", "b-1", "b-2", "b-3"]
