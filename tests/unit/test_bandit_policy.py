"""Observations, the best arm and races."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

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
    Recommendation,
    TaskSet,
    make_policy,
)
from hpc_toolkit.bandit.racing import best_row, survivors
from hpc_toolkit.bandit.rule import Reward, Stream, TaskResults, rewards_of
from hpc_toolkit.errors import ConfigError

ARMS = ArmTable(tuple(Arm(word, word, (float(i),)) for i, word in enumerate("abcdef")), ("layer",))


def best_of(policy: Policy) -> Recommendation:
    """The best arm of a policy that knows one."""
    best = policy.best()
    assert best is not None
    return best


def told(arm: str, score: float, stderr: float | None = None) -> Observation:
    stderrs = {} if stderr is None else {"task": stderr}
    return Observation(arm, {"task": score}, stderrs)


def mean_reward(observation: Observation) -> Reward | None:
    """The mean over the tasks of one observation."""
    tasks = TaskSet(tuple(sorted({*observation.scores, *observation.failed})))
    results = TaskResults.empty(1, tasks)
    results.take(0, observation)
    return rewards_of(results, [0]).get(0)


def test_reward_is_the_mean_over_the_tasks_that_there_are_with_its_standard_error() -> None:
    seen = Observation("a", {"x": 0.2, "y": 0.6}, {"x": 0.03, "y": 0.04})
    half_failed = Observation("a", {"x": 0.2, "y": 0.4}, failed=("u", "v"))

    reward, other = mean_reward(seen), mean_reward(half_failed)

    assert reward is not None
    assert other is not None
    assert (reward.mean, reward.stderr, other.mean) == pytest.approx((0.4, 0.05 / 2, 0.3))


@pytest.mark.parametrize(
    ("given", "claim"),
    [
        ({"scores": {"x": math.nan}}, r"scores\['x'\] is nan"),
        ({"scores": {"x": math.inf}}, r"scores\['x'\] is inf"),
        ({"scores": {"x": "0.5"}}, r"scores\['x'\] is '0.5', not a number"),
        ({"scores": {"x": True}}, r"scores\['x'\] is True, not a number"),
        ({"scores": {"x": 1.0}, "stderrs": {"x": -0.1}}, r"stderrs\['x'\] is negative"),
        ({"scores": {"x": 1.0}, "seconds": {"x": -1}}, r"seconds\['x'\] is negative"),
        ({"scores": {"x": 1.0}, "stderrs": {"y": 0.1}}, "'y' has a standard error but no score"),
        ({"scores": {"x": 1.0}, "failed": ("x",)}, "'x' has a score and is called failed"),
        ({}, "it has neither scores nor failed tasks"),
    ],
)
def test_observation_with_an_unusable_value_is_refused(given: dict[str, Any], claim: str) -> None:
    with pytest.raises(ConfigError, match=f"arm 'a': .*{claim}|arm 'a': {claim}"):
        Observation("a", **given)


def test_observation_survives_json_exactly() -> None:
    seen = Observation("a", {"x": np.float64(0.1), "b": 1}, {"x": 1e-17}, {"z": 0.1 + 0.2}, ("z",))

    again = Observation.from_json(json.loads(json.dumps(seen.to_json(), allow_nan=False)))

    assert again == seen


def test_best_is_the_highest_mean_and_lists_ties_within_two_standard_errors() -> None:
    policy = make_policy("random", ARMS, 0)
    # Two combined standard errors are 2 * sqrt(0.03^2 + 0.04^2) = 0.1.
    for arm, score in {"a": 0.39, "b": 0.5, "c": 0.401, "d": 0.45}.items():
        policy.tell(told(arm, score, 0.03 if arm == "b" else 0.04))

    best = best_of(policy)

    assert (best.arm, best.mean, best.stderr) == ("b", 0.5, 0.03)
    assert best.ties == ("d", "c")


PAIRED = [
    # b is 0.01 lower on every task, so the tasks' own errors do not matter.
    ({"a": (0.1, 0.5, 0.9, 0.4), "b": (0.09, 0.49, 0.89, 0.39)}, ()),
    # a has no score on the last task, on which all are low; where both have one, b is better.
    ({"a": (0.7, 0.8, None), "b": (0.8, 0.9, 0.1), "c": (0.0, 0.1, 0.0)}, ("b",)),
]


@pytest.mark.parametrize(("scores", "ties"), PAIRED)
@pytest.mark.parametrize("stderr", [None, 0.2])
def test_ties_are_judged_by_paired_differences_over_the_common_tasks(
    scores: dict[str, tuple[float | None, ...]], ties: tuple[str, ...], stderr: Any
) -> None:
    names = tuple("xyzw"[: len(scores["a"])])
    policy = make_policy("random", ARMS, 0, tasks=TaskSet(names))
    for arm, values in scores.items():
        known = {
            name: value for name, value in zip(names, values, strict=True) if value is not None
        }
        errors = dict.fromkeys(known, stderr) if stderr else {}
        failed = tuple(name for name in names if name not in known)
        policy.tell(Observation(arm, known, errors, {}, failed))

    best = best_of(policy)

    assert (best.arm, best.ties) == ("a", ties)


@given(scores=st.lists(st.tuples(*[st.integers(-9, 9)] * 2), min_size=2, max_size=9))
def test_ties_are_those_of_the_paired_t_test(scores: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    names = tuple(f"t{n}" for n in range(len(scores)))
    policy = make_policy("random", ARMS, 0, tasks=TaskSet(names))
    for arm, values in zip("ab", zip(*scores, strict=True), strict=True):
        policy.tell(Observation(arm, dict(zip(names, map(float, values), strict=True))))
    behind = [first - second for first, second in scores]
    if len(set(behind)) == 1:
        p = 1.0 if behind[0] == 0 else 0.0
    else:
        p = float(stats.ttest_1samp(behind, 0.0).pvalue)

    tied = bool(best_of(policy).ties)

    assert tied == (p > 0.05) or 0.045 < p < 0.055


def test_unknown_arms_and_unusable_numbers_are_refused() -> None:
    policy = make_policy("random", ARMS, 0)

    with pytest.raises(ConfigError, match="unknown arm 'zz'"):
        policy.tell(told("zz", 0.5))
    with pytest.raises(ConfigError, match="unknown arm 'zz'"):
        policy.ask(1, ["zz"])
    with pytest.raises(ConfigError, match="requested -1 arms"):
        policy.ask(-1)
    seeds: list[Any] = [-1, 1.5, True, "1"]
    for seed in seeds:
        with pytest.raises(ConfigError, match="seed is"):
            make_policy("random", ARMS, seed)


ONE = TaskSet(("x",))


@pytest.mark.parametrize(
    ("name", "options", "says", "hint"),
    [
        *(("gp-ucb", {"beta": one}, "gp-ucb: beta is ", "") for one in (-1, math.nan, math.inf)),
        *(("gp-ucb", {"beta": one}, "gp-ucb: beta is ", "") for one in (10**400, "2")),
        *(("gp-ucb", {"initial": one}, "gp-ucb: initial is ", "") for one in (0, 2.5, True)),
        ("gp-ei", {"features": "none"}, "gp-ei: features is ", ""),
        ("gp-ucb", {"betta": 1.0}, "policy 'gp-ucb' has no option 'betta'", "did you mean 'beta'?"),
        ("random", {"beta": 1.0}, "policy 'random' has no option 'beta'", "it has no options"),
        ("random", {"tasks": TaskSet(())}, "the task set is empty", ""),
        ("racing", {"tasks": ONE, "c": -1}, "racing: c is -1", ""),
        ("racing", {"tasks": ONE, "first": 1}, "racing: first is 1", ""),
        ("racing", {"tasks": ONE, "block": 0}, "racing: block is 0", ""),
    ],
)
def test_make_policy_unusable_option_is_refused(
    name: str, options: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        make_policy(name, ARMS, 0, **options)

    assert caught.value.hint
    assert hint in caught.value.hint


def names(count: int) -> tuple[str, ...]:
    return tuple(f"t{task}" for task in range(count))


def arms(count: int) -> ArmTable:
    return ArmTable(tuple(Arm(f"a{arm}", "g", ()) for arm in range(count)), ())


def answered(arm: str, tasks: tuple[str, ...], scores: Mapping[str, float]) -> Observation:
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
            policy.tell(answered(proposal.arm, proposal.tasks, row))
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
            seen = answered(proposal.arm, proposal.tasks, row)
            took = {task: seconds[int(task[1:])] for task in proposal.tasks}
            policy.tell(Observation(seen.arm, seen.scores, {}, took, seen.failed))

    best = best_of(policy)
    assert best.arm == "a11"
    assert set(best.tasks) <= set(names(9)) - set(names(lost))
