from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from hpc_toolkit.bandit import (
    Arm,
    ArmTable,
    Observation,
    Policy,
    TaskSet,
    make_policy,
)
from hpc_toolkit.bandit.racing import best_row, survivors
from hpc_toolkit.bandit.rule import Stream
from tests.unit.test_bandit_policy import best_of


def names(count: int) -> tuple[str, ...]:
    return tuple(f"t{task}" for task in range(count))


def arms(count: int) -> ArmTable:
    return ArmTable(tuple(Arm(f"a{arm}", "g", ()) for arm in range(count)), ())


def told(arm: str, tasks: tuple[str, ...], scores: Mapping[str, float]) -> Observation:
    """NaN is a failed task."""
    good = {task: scores[task] for task in tasks if not math.isnan(scores[task])}
    return Observation(arm, good, failed=tuple(set(tasks) - set(good)))


def finish(policy: Policy, scores: NDArray[np.float64], batch: int = 10**6) -> list[list[str]]:
    """Tell what is asked until nothing is; the tasks that each arm was asked for, in order."""
    asked: list[list[str]] = [[] for _ in scores]
    while proposals := policy.ask(batch):
        for proposal in proposals:
            arm = int(proposal.arm[1:])
            row = dict(zip(names(len(scores[0])), scores[arm], strict=True))
            asked[arm] += proposal.tasks
            policy.tell(told(proposal.arm, proposal.tasks, row))
    return asked


def pilots(seed: int, count: int) -> list[int]:
    """The arms in the order in which they are asked how long the tasks take."""
    order: list[int] = np.random.default_rng([seed, Stream.PILOT]).permutation(count).tolist()
    return order


def race_by_hand(
    scores: NDArray[np.float64], order: list[int], c: float, first: int, block: int
) -> tuple[set[int], list[int]]:
    """Who is left, and on how many tasks each arm ran: the published formula in plain loops."""
    k_all = len(order)
    left, ran = set(range(len(scores))), [0] * len(scores)
    looks = [*range(first, k_all, block), k_all]
    for k in looks:
        for arm in left:
            ran[arm] = k
        means = {arm: sum(scores[arm][t] for t in order[:k]) / k for arm in left}
        best = max(sorted(left), key=lambda arm: means[arm])
        for arm in sorted(left - {best}):
            gaps = [scores[best][t] - scores[arm][t] for t in order[:k]]
            gap = sum(gaps) / k
            sd = math.sqrt(sum((one - gap) ** 2 for one in gaps) / (k - 1))
            if gap > c * sd / math.sqrt(k) * math.sqrt(1 - k / k_all):
                left.remove(arm)
        if len(left) == 1:
            break
    return left, ran


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("c", "first", "block"), [(2.5, 3, 1), (1.0, 2, 2), (0.0, 4, 5)])
def test_racing_drops_and_asks_as_the_formula_says(
    seed: int, c: float, first: int, block: int
) -> None:
    rng = np.random.default_rng([seed, 9])
    # Arms and tasks of their own level, as real tasks have, and noise of the arms' size.
    scores = rng.normal(size=(20, 1)) + rng.normal(size=(1, 9)) + rng.normal(size=(20, 9))
    seconds = rng.permutation(9.0 + np.arange(9))
    policy = make_policy(
        "racing", arms(20), seed,
        tasks=TaskSet(names(9), tuple(seconds)), c=c, first=first, block=block,
    )  # fmt: skip
    order = np.argsort(seconds).tolist()

    asked = finish(policy, scores, batch=1 + seed % 7)

    left, ran = race_by_hand(scores, order, c, first, block)
    assert [len(tasks) for tasks in asked] == ran
    assert all(tasks == [f"t{task}" for task in order[: len(tasks)]] for tasks in asked)
    best = best_of(policy)
    assert {int(best.arm[1:])} == left


@given(
    scores=arrays.arrays(
        np.float64, st.tuples(st.integers(1, 8), st.integers(1, 6)),
        elements=st.floats(-1e6, 1e6) | st.just(math.nan),
    ),
    c=st.floats(0, 5),
    more=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_racing_never_drops_the_leader(scores: NDArray[np.float64], c: float, more: int) -> None:
    """Whatever failed, unless every arm has lost most of its tasks."""
    tasks = scores.shape[1]
    usable = np.flatnonzero(2 * np.isnan(scores).sum(axis=1) <= tasks)

    left = survivors(scores, tasks + more, c)

    assert set(left) <= set(usable.tolist())
    if usable.size:
        assert usable[best_row(scores[usable])] in left


def test_racing_that_drops_nobody_ends_with_the_exact_best_mean() -> None:
    scores = np.random.default_rng(0).normal(size=(9, 7))
    policy = make_policy("racing", arms(9), 0, tasks=TaskSet(names(7), (1.0,) * 7), c=1e9)

    asked = finish(policy, scores)

    best = best_of(policy)
    exact = [math.fsum(row) / 7 for row in scores.tolist()]
    assert best.mean == max(exact)
    assert best.arm == f"a{int(np.argmax(exact))}"
    assert best.tasks == names(7)
    assert all(len(tasks) == 7 for tasks in asked)


def test_race_in_which_all_arms_fail_asks_for_all_tasks_and_has_no_best() -> None:
    """Only after the last task is it certain that none of them tells anything."""
    policy = make_policy("racing", arms(3), 0, tasks=TaskSet(names(4), (1.0,) * 4))

    asked = finish(policy, np.full((3, 4), math.nan))

    assert [len(tasks) for tasks in asked] == [4, 4, 4]
    assert policy.best() is None


@pytest.mark.parametrize("witness", [None, "timed", "untimed"])
def test_race_leaves_out_tasks_that_failed_on_all_arms_and_takes_the_next(
    witness: str | None,
) -> None:
    """The cheapest tasks, of a data set that is not there. With a witness, one arm came through
    them before it went: that arm is the worst, and must not win for having been there."""
    lost = 3
    rng = np.random.default_rng(lost)
    scores = np.sort(rng.normal(size=12))[:, None] + 0.01 * rng.normal(size=(12, 9))
    seconds = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0)
    timed = TaskSet(names(9), () if witness == "untimed" else seconds)
    seed = next(seed for seed in range(99) if pilots(seed, 12)[0] == 0)
    policy = make_policy("racing", arms(12), seed, tasks=timed)
    gone = scores.copy()
    gone[1 if witness else 0 :, :lost] = math.nan

    while proposals := policy.ask(99):
        for proposal in proposals:
            row = dict(zip(names(9), gone[int(proposal.arm[1:])], strict=True))
            seen = told(proposal.arm, proposal.tasks, row)
            took = {task: seconds[int(task[1:])] for task in proposal.tasks}
            policy.tell(Observation(seen.arm, seen.scores, {}, took, seen.failed))

    best = best_of(policy)
    assert best.arm == "a11"
    assert best.dropped == names(lost)
    assert set(best.tasks) <= set(names(9)) - set(names(lost))
