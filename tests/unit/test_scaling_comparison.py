"""Comparisons against known answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.training.scaling.comparison import Point, Series, compare, judge

SIZES = (1, 2, 4, 8)


def series(rates: dict[int, float | tuple[float, ...]]) -> Series:
    points = [
        Point(world_size=size, rates=rate if isinstance(rate, tuple) else (rate,))
        for size, rate in rates.items()
    ]
    return Series(name="s", points=tuple(points))


def amdahl(share: float) -> Series:
    return series({n: 1 / (share + (1 - share) / n) for n in SIZES})


def reasons(measured: Series, minimum: float = 0.85) -> str:
    return " ".join(judge(compare(measured), minimum).reasons)


@pytest.mark.parametrize(
    ("rates", "said", "unsaid"),
    [
        ({1: 1.0, 2: 2.2, 4: 4.8}, "on 4 the efficiency is 120.0%, more than the ranks exp", "%%"),
        (
            {1: (10.0, 10.0), 2: (16.0, 19.0)},
            "repeats differ too much to tell: 80.0% to 95.0%",
            "%%",
        ),
        ({1: (10.0, 10.0), 2: (12.0, 16.0)}, "", "differ too much"),
    ],
)
def test_what_is_odd_about_the_rates_is_among_the_reasons(
    rates: dict[int, Any], said: str, unsaid: str
) -> None:
    found = reasons(series(rates))

    assert said in found
    assert unsaid not in found


def test_rows_are_what_the_formulas_say() -> None:
    measured = series({1: (9.0, 10.0, 11.0), 4: (30.0, 32.0, 40.0)})
    found = compare(measured.at_price(2.0, "world_size"))

    row = found.rows[1]
    assert (row.speedup, row.ideal, row.efficiency) == (3.2, 4.0, 0.8)
    assert (row.low, row.high) == (30 / 11 / 4, 40 / 9 / 4)
    assert row.gpu_hours == pytest.approx(4 * 1000 / 32 / 3600)
    assert row.cost == row.cost_per_1000 == pytest.approx(2 * row.gpu_hours)
    assert row.premium == pytest.approx(0.25)
    first = found.rows[0]
    assert (first.efficiency, first.low, first.high, first.premium) == (1, 1, 1, 0)


@given(
    rates=st.dictionaries(
        st.sampled_from([1, 2, 3, 4, 8, 16]),
        st.lists(st.floats(0.01, 1e6), min_size=1, max_size=4),
        min_size=1,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_the_order_of_points_and_repeats_changes_nothing(
    rates: dict[int, list[float]], seed: object
) -> None:
    ordered = series({size: tuple(values) for size, values in rates.items()})
    items = list(rates.items())
    seed.shuffle(items)  # type: ignore[attr-defined]
    mixed = series({size: tuple(reversed(values)) for size, values in items})

    assert compare(ordered) == compare(mixed)
    assert judge(compare(ordered)) == judge(compare(mixed))


@given(st.floats(0.0, 1.0), st.floats(0.1, 1.0))
def test_the_advice_is_a_world_size_all_of_whose_smaller_ones_are_good_enough(
    share: float, minimum: float
) -> None:
    comparison = compare(amdahl(share))

    verdict = judge(comparison, minimum)

    enough = [row.world_size for row in comparison.rows if row.efficiency >= minimum]
    assert verdict.world_size == max(enough)
    assert verdict.below == tuple(n for n in SIZES if n not in enough)
    assert (verdict.word == "poor") == bool(verdict.below)
