"""When a search stops: budgets; and paired differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hpc_toolkit.bandit import (
    Arm,
    ArmTable,
    Observation,
    Pull,
    StopRules,
    TaskSet,
    ask_within,
    make_policy,
)
from hpc_toolkit.bandit.racing import best_row, gaps
from hpc_toolkit.errors import ConfigError

TASKS = TaskSet(("x", "y"), (1.0, 3.0))


def line(count: int) -> ArmTable:
    return ArmTable(
        tuple(Arm(f"a{i}", f"g{i // 2}", (float(i),)) for i in range(count)), ("layer",)
    )


def test_budget_of_gpu_seconds_adds_what_pending_tasks_are_expected_to_take() -> None:
    """Task x took 2 s once and 4 s once, so 3 s are expected; task y is expected by the set."""
    policy = make_policy("random", line(9), 0, tasks=TASKS, stop=StopRules(gpu_s=12.5))
    policy.tell(Observation("a0", {"x": 0.5}, seconds={"x": 2.0}))
    policy.tell(Observation("a1", failed=("x",), seconds={"x": 4.0}))

    assert policy.stop() is None
    assert policy.stop([Pull("a2", ("x", "y"))]) is None
    assert policy.stop(["a0", "a1"]) is None
    assert policy.stop([Pull("a2", ("x",)), Pull("a3", ("x", "y"))]) == (
        "requested 15.0 s of GPU time, the budget is 12.5 s"
    )


@pytest.mark.parametrize("pending", [[], ["a1", "a2"]])
def test_ask_within_takes_what_asks_of_one_within_the_budget_would(pending: list[str]) -> None:
    policy = make_policy("random", line(9), 0, tasks=TASKS, stop=StopRules(evaluations=11))
    one_by_one: list[Any] = []
    while policy.stop([*pending, *(p.pull for p in one_by_one)]) is None:
        one_by_one += policy.ask(1, [*pending, *(p.pull for p in one_by_one)])

    assert ask_within(policy, 99, pending) == one_by_one
    assert len(one_by_one) == 6 - len(pending)
    assert ask_within(policy, 2, pending) == one_by_one[:2]


@pytest.mark.parametrize(
    ("given", "claim"),
    [
        ({"pulls": -1}, "stop: pulls is -1"),
        ({"pulls": 1.5}, "stop: pulls is 1.5"),
        ({"evaluations": True}, "stop: evaluations is True"),
        ({"gpu_s": math.nan}, "stop: gpu_s is nan"),
        ({"wall_s": -0.1}, "stop: wall_s is -0.1"),
    ],
)
def test_stop_rule_with_an_unusable_value_is_refused(given: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=claim):
        StopRules(**given)


@given(
    scores=arrays.arrays(
        np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)),
        elements=st.floats(-100, 100) | st.just(math.nan),
    ),
    more=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_gaps_are_those_of_plain_loops(scores: np.ndarray, more: int) -> None:
    done = scores.shape[1]
    population = done + more
    leader = best_row(scores)

    found = gaps(scores, population)

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
