from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpc_toolkit.bandit.odds import best_row, gaps, silent_tasks


@given(
    scores=arrays.arrays(
        np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)),
        elements=st.floats(-100, 100) | st.just(math.nan),
    ),
    more=st.integers(0, 3),
    data=st.data(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_gaps_are_those_of_plain_loops(scores: np.ndarray, more: int, data: st.DataObject) -> None:
    done = scores.shape[1]
    population = done + more
    leader = data.draw(st.integers(0, len(scores) - 1))

    found = gaps(scores, population, leader)

    for row, mean, error in zip(scores, found.means, found.errors, strict=True):
        apart = [
            float(one - other)
            for one, other in zip(scores[leader], row, strict=True)
            if not math.isnan(one) and not math.isnan(other)
        ]
        average = sum(apart) / len(apart) if apart else 0.0
        assert mean == pytest.approx(average, abs=1e-9)
        if more and len(apart) < 2:
            assert error == math.inf
        elif len(apart) > 1:
            variance = sum((one - average) ** 2 for one in apart) / (len(apart) - 1)
            expected = math.sqrt(variance / len(apart) * (1 - done / population))
            assert error == pytest.approx(expected, abs=1e-9)
        else:
            assert error == 0.0


def test_leader_neither_wins_nor_loses_by_the_task_that_it_failed_on() -> None:
    hard = np.array([[0.9, math.nan, 0.9], [0.95, 0.2, 0.95]])
    easy = np.array([[0.9, math.nan], [0.5, 0.9]])

    assert best_row(hard) == 1
    assert gaps(hard, 5).leader == 1
    assert best_row(easy) == 0


def test_tasks_are_silent_with_fewer_than_two_scores_of_three_arms_or_none_of_two() -> None:
    nan = math.nan
    three = np.array([[nan, 0.1, 0.1, 0.1], [nan, nan, 0.2, 0.2], [nan, nan, nan, 0.3]])

    assert silent_tasks(three).tolist() == [True, True, False, False]
    assert silent_tasks(three[:2]).tolist() == [True, False, False, False]
    assert silent_tasks(three[:1]).tolist() == [True, False, False, False]
