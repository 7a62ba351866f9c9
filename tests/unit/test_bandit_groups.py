"""Policies whose levers are the groups of the table."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.rules.guided import space_filling_order
from hpc_toolkit.errors import ConfigError


def lever_table(levers: int, arms: int) -> ArmTable:
    return ArmTable(
        tuple(
            Arm(f"{lever}/{i}", str(lever), (float(lever),))
            for lever in range(levers)
            for i in range(arms)
        ),
        ("x",),
    )


def lever_of(arm: str) -> int:
    return int(arm.partition("/")[0])


def score(value: float) -> dict[str, float]:
    return {"task": value}


def test_epsilon_greedy_pulls_every_group_before_any_twice() -> None:
    policy = make_policy("epsilon-greedy", lever_table(5, 3), 4)

    levers = [lever_of(proposal.arm) for proposal in policy.ask(5)]

    assert levers == space_filling_order(np.arange(5.0)[:, None], 4, 5)


@pytest.mark.parametrize(("epsilon", "others"), [(0.0, 0), (0.4, 160)])
def test_epsilon_greedy_leaves_the_best_group_as_often_as_epsilon_says(
    epsilon: float, others: int
) -> None:
    table = lever_table(4, 700)
    policy = make_policy("epsilon-greedy", table, 0, epsilon=epsilon)
    for lever in range(4):
        policy.tell(Observation(f"{lever}/0", score(0.9 if lever == 2 else -0.1 * lever)))

    counts = Counter(lever_of(proposal.arm) for proposal in policy.ask(533))

    # A draw takes each of four groups, the best one too: 533 * 0.4 * 3 / 4 = 160, sd 10.6.
    assert abs(533 - counts[2] - others) < 4 * 10.6
    if not epsilon:
        assert counts[2] == 533


def test_epsilon_greedy_goes_to_other_groups_when_the_best_one_is_used_up() -> None:
    policy = make_policy("epsilon-greedy", lever_table(3, 2), 0, epsilon=0)
    for arm, value in {"0/0": 0.2, "1/0": 0.9, "2/0": 0.5, "1/1": 0.8}.items():
        policy.tell(Observation(arm, score(value)))

    assert [proposal.arm for proposal in policy.ask(9)] == ["2/1", "0/1"]


def test_epsilon_greedy_counts_a_group_without_a_reward_as_the_worst() -> None:
    policy = make_policy("epsilon-greedy", lever_table(3, 2), 0, epsilon=0)
    policy.tell(Observation("0/0", score(-5.0)))
    policy.tell(Observation("1/0", failed=("task",)))
    policy.tell(Observation("2/0", score(-4.0)))

    assert [proposal.arm for proposal in policy.ask(3)] == ["2/1", "0/1", "1/1"]


@pytest.mark.parametrize("epsilon", [-0.1, 1.1, math.nan, "0.1", True])
def test_epsilon_greedy_with_an_unusable_epsilon_is_refused(epsilon: Any) -> None:
    with pytest.raises(ConfigError, match="epsilon-greedy: epsilon is"):
        make_policy("epsilon-greedy", lever_table(2, 2), 0, epsilon=epsilon)


def test_gaussian_ts_draws_from_the_published_posterior() -> None:
    """How often each of three groups is asked for, against draws of its posterior made here."""
    table = lever_table(3, 2000)
    policy = make_policy("gaussian-ts", table, 7)
    told = {"0/0": 0.1, "1/0": 0.5, "1/1": 0.6, "2/0": 0.4}
    for arm, value in told.items():
        policy.tell(Observation(arm, score(value)))
    values = np.array(list(told.values()))
    y = (values - values.mean()) / values.std()
    centres = np.array([y[0] / 2, (y[1] + y[2]) / 3, y[3] / 2])
    widths = np.sqrt([1 / 2, 1 / 3, 1 / 2])
    draws = centres + widths * np.random.default_rng(0).standard_normal((20000, 3))
    expected = np.bincount(draws.argmax(axis=1), minlength=3) / 20000

    asked = policy.ask(1500)

    shares = np.bincount([lever_of(proposal.arm) for proposal in asked], minlength=3) / 1500
    # Four standard errors of 1,500 draws.
    assert np.abs(shares - expected).max() < 4 * 0.5 / math.sqrt(1500)
    assert shares.max() < 0.9


def test_gaussian_ts_finds_the_best_group_and_stays_with_it() -> None:
    table = lever_table(4, 100)
    policy = make_policy("gaussian-ts", table, 5)
    rng = np.random.default_rng(5)
    pulls = []

    for _ in range(80):
        arm = policy.ask(1)[0].arm
        pulls.append(lever_of(arm))
        value = 0.9 if lever_of(arm) == 2 else 0.1
        policy.tell(Observation(arm, score(value + 0.05 * rng.uniform())))

    assert pulls[40:].count(2) > 35
