"""Medians, curves and bands over searches."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit.bench import outcome
from hpc_toolkit.bandit.bench.outcome import at_costs, first_at, mean_band, spread
from hpc_toolkit.errors import ConfigError


def test_spread_of_known_numbers_is_exact() -> None:
    found = spread(range(1, 11), [0] * 10)

    assert (found.median, found.p90, found.reached) == (5.5, 9.0, 1.0)
    assert found.low <= 5.5 <= found.high
    assert {found.low, found.high} <= set(map(float, range(1, 11)))


def test_spread_counts_searches_that_never_got_there() -> None:
    half = spread([1.0, 2.0, math.inf, math.inf], [0] * 4)

    assert (half.median, half.p90, half.reached) == (math.inf, math.inf, 0.5)
    assert half.low == 1.0
    most = spread([3.0] * 9 + [math.inf], [0] * 10)
    assert (most.median, most.p90, most.reached) == (3.0, 3.0, 0.9)


def test_a_median_band_covers_the_median_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    samples = rng.exponential(size=(100, 60))

    bands = [spread(sample, [0] * 60, seed=number) for number, sample in enumerate(samples)]
    covered = np.mean([band.low <= math.log(2.0) <= band.high for band in bands])

    assert 0.88 <= covered <= 0.99


def test_a_band_is_of_the_lower_of_two_middle_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "COVERAGE", 0.2)

    found = spread([1.0, 3.0], [0, 0])

    # Three of four resamples have 1 at or below their middle.
    assert (found.low, found.high) == (1.0, 1.0)


def test_searches_on_one_table_are_drawn_together() -> None:
    values = np.repeat([1.0, 2.0, 3.0, 4.0], 50)
    tables = np.repeat(range(4), 50).tolist()

    apart = spread(values.tolist(), list(range(200)))
    together = spread(values.tolist(), tables)

    assert (apart.low, apart.high) == (2.0, 3.0)
    assert (together.low, together.high) == (1.0, 4.0)
    wide = mean_band(values[:, None], tables)
    narrow = mean_band(values[:, None], list(range(200)))
    assert wide[0] == narrow[0] == 2.5
    assert (wide[2] - wide[1])[0] > 3 * (narrow[2] - narrow[1])[0]


def test_mean_band_of_normal_numbers_is_two_standard_errors_wide() -> None:
    values = np.random.default_rng(0).normal(size=(400, 3))

    mean, low, high = mean_band(values, [7] * 400)

    np.testing.assert_allclose(mean, values.mean(axis=0))
    np.testing.assert_allclose(high - low, 2 * 1.96 / 20.0, rtol=0.15)
    assert ((low < mean) & (mean < high)).all()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(-5, 5))
def test_first_at_is_the_first_place_that_reaches_the_goal(
    values: list[float], goal: float
) -> None:
    found = first_at(np.array(values), goal)

    places = [place for place, value in enumerate(values, start=1) if value >= goal]
    assert found == (places[0] if places else math.inf)


def test_at_costs_steps_up_where_something_was_learned() -> None:
    costs, values = np.array([1.0, 3.0, 3.0]), np.array([10.0, 20.0, 30.0])

    found = at_costs(costs, values, np.array([0.0, 1.0, 2.9, 3.0, 9.0]), -1.0)

    assert found.tolist() == [-1.0, 10.0, 10.0, 30.0, 30.0]


def test_bands_of_no_search_are_refused() -> None:
    with pytest.raises(ConfigError, match="no search to sum up"):
        spread([], [])
