"""Replayed searches: what a policy is told, and how long its pulls take."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay import Asks, ScoreTable, Trace, finish_times, replay
from simulation.cluster import simulate
from simulation.scenario import Group, Scenario

from hpc_toolkit.bandit import Arm, ArmTable, make_policy
from hpc_toolkit.bandit.policy import TaskSet


def small_table(arms: int = 12, tasks: int = 3, *, seconds: bool = True) -> ScoreTable:
    """Arms on a line; scores that differ, and durations that do as well."""
    rng = np.random.default_rng(4)
    line = tuple(Arm(f"a{n}", f"g{n // 4}", (float(n),)) for n in range(arms))
    return ScoreTable(
        ArmTable(line, ("relative_depth",)),
        TaskSet(tuple(f"t{n}" for n in range(tasks))),
        rng.uniform(0.1, 0.9, (arms, tasks)),
        rng.integers(1, 9, (arms, tasks)).astype(np.float64) if seconds else None,
    )


def search(asks: Asks, *, policy: str = "random", seed: int = 0, pulls: int | None = None) -> Trace:
    table = small_table()
    made = make_policy(policy, table.arms, seed, tasks=table.tasks)
    return replay(table, made, asks, pulls=pulls)


ONE = Asks("rounds", 1)


def test_one_at_a_time_every_pull_knows_all_before_it() -> None:
    trace = search(ONE)

    assert sorted(trace.arms) == list(range(12))
    assert trace.told_before == tuple(range(12))
    best_so_far = np.maximum.accumulate(trace.table.means[list(trace.arms)])
    np.testing.assert_array_equal(trace.known, best_so_far)
    assert trace.evaluations.tolist() == [3.0 * n for n in range(1, 13)]


@given(st.sampled_from(["rounds", "window"]), st.integers(1, 15), st.integers(1, 12))
def test_a_search_ends_after_its_pulls_and_tells_them_all(kind: str, size: int, pulls: int) -> None:
    asks = Asks.parse(f"{kind}:{size}")

    trace = search(asks, pulls=pulls)

    assert len(trace.arms) == len(trace.tasks) == len(trace.known) == pulls
    assert not np.isnan(trace.known).any()
    assert all(told <= number for number, told in enumerate(trace.told_before))


@pytest.mark.parametrize("asks", ["one", "rounds:4", "window:4"])
def test_what_is_known_is_what_the_policy_itself_would_recommend(asks: str) -> None:
    trace = search(Asks.parse(asks), policy="gp-ucb", pulls=9)
    table = trace.table
    twin = make_policy("gp-ucb", table.arms, 0, tasks=table.tasks)

    for number, arm in enumerate(trace.arms):
        twin.tell(table.observation(arm, trace.tasks[number]))
        best = twin.best()
        assert best is not None
        assert trace.known[number] == table.means[table.arms.index(best.arm)]


def test_costs_add_up_and_one_gpu_takes_as_long_as_the_sum() -> None:
    trace = search(Asks("window", 3), pulls=7)
    assert trace.table.seconds is not None
    each = trace.table.seconds[list(trace.arms)]

    np.testing.assert_allclose(trace.gpu_s, np.cumsum(each.sum(axis=1)))
    np.testing.assert_allclose(search(ONE).wall_s(1), search(ONE).gpu_s)
    assert trace.wall_s(1)[-1] == trace.gpu_s[-1]
    # Enough GPUs: the longest evaluation of each pull, one pull after the other.
    one_by_one = search(ONE, pulls=7).wall_s(99)
    np.testing.assert_allclose(one_by_one, np.cumsum(each.max(axis=1)))
    assert (np.diff(trace.wall_s(2)) >= 0).all()


def test_finish_times_are_close_to_those_of_the_queues_own_code() -> None:
    """The queue does not begin with the longest, so no single evaluation may dominate here."""
    seconds = np.sort(np.random.default_rng(3).lognormal(4.0, 0.8, 120))[::-1].tolist()
    groups = tuple(Group((one,)) for one in seconds)

    scenarios = [Scenario(groups=groups, workers=4, seed=seed) for seed in range(5)]
    spans = [simulate(one).makespan_s for one in scenarios]  # the order is partly random
    found = finish_times([seconds], [0], 4)

    assert np.median(spans) == pytest.approx(found.max(), rel=0.05)
