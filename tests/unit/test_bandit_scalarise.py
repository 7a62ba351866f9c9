from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpc_toolkit.bandit import Arm, ArmTable, Observation, TaskSet, make_policy
from hpc_toolkit.bandit.rewards import SCALARISERS, weights

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAN = math.nan
TASKS = TaskSet(("a", "b", "c", "d"), kinds=("sts", "sts", "retrieval", "sts"))
every_scalariser = pytest.mark.parametrize("name", sorted(SCALARISERS))

scores_with_gaps = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 7), st.just(4)),
    elements=st.sampled_from([0.1, 0.2, 0.3, 0.7, NAN, -2.0, 1e6]),
)


def test_scalarisers_have_the_values_of_their_definitions() -> None:
    scores = np.array([[0.0, 3.0, 6.0, NAN], [2.0, 3.0, 2.0, NAN], [1.0, NAN, 1.0, NAN]])

    found = {name: make(scores, TASKS) for name, make in SCALARISERS.items()}

    np.testing.assert_allclose(found["mean"], [3.0, 7 / 3, 1.0])
    # Retrieval is one task, and the two of STS that have a score are one kind.
    np.testing.assert_allclose(found["mean-kind"], [(1.5 + 6) / 2, (2.5 + 2) / 2, 1.0])
    # By rank on a, b, c: 0, 1/2, 1; 1, 1/2, 1/2; 1/2, 0.
    np.testing.assert_allclose(found["mean-rank"], [0.5, 2 / 3, 0.25])


@every_scalariser
@given(scores=scores_with_gaps, data=st.data())
@settings(max_examples=25, deadline=None)
def test_scalariser_does_not_depend_on_the_order_of_tasks_or_arms(
    name: str, scores: NDArray[np.float64], data: st.DataObject
) -> None:
    columns = data.draw(st.permutations(range(4)))
    rows = data.draw(st.permutations(range(len(scores))))

    found = SCALARISERS[name](scores[rows][:, columns], TASKS.part(columns))

    np.testing.assert_allclose(found, SCALARISERS[name](scores, TASKS)[rows], atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(SCALARISERS) - {"mean-rank"}))
def test_weights_are_the_slopes_of_the_reward(name: str) -> None:
    scores = np.array([[0.1, 0.5, 0.2, 0.9], [0.3, NAN, 0.7, 0.2], [0.8, 0.1, 0.6, NAN]])
    slopes = weights(name, scores, TASKS)
    assert slopes is not None

    for arm, task in np.argwhere(~np.isnan(scores)):
        moved = scores.copy()
        moved[arm, task] += 0.01
        rise = SCALARISERS[name](moved, TASKS)[arm] - SCALARISERS[name](scores, TASKS)[arm]
        assert slopes[arm, task] == pytest.approx(rise / 0.01)
    assert not slopes[np.isnan(scores)].any()


@every_scalariser
def test_asks_between_tells_change_nothing_later(name: str) -> None:
    """Rewards are kept between tells; a tell of a further arm may change the ranks of others."""
    table = ArmTable(tuple(Arm(str(n), "g", (float(n),)) for n in range(5)), ("at",))
    chance = np.random.default_rng(1)
    tells = [
        Observation(str(arm), {task: chance.random()}, {task: 0.1})
        for arm in (2, 0, 3)
        for task in TASKS.names
    ]
    asked, fresh = (make_policy("gp-ucb", table, 0, tasks=TASKS, scalariser=name) for _ in range(2))

    for tell in tells:
        asked.tell(tell)
        asked.ask(1)
    for tell in tells:
        fresh.tell(tell)

    assert asked.ask(2) == fresh.ask(2)
