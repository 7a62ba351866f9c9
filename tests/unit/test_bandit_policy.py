from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_toolkit.bandit import Arm, ArmTable, Observation, Policy, Recommendation, make_policy
from hpc_toolkit.bandit.policy import TaskSet
from hpc_toolkit.bandit.rule import Reward, TaskResults, rewards_of
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
