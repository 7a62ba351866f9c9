"""Gaussian processes, what single rules choose, the random numbers they draw, and budgets."""

from __future__ import annotations

import ast
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import hpc_toolkit.bandit
from hpc_toolkit.bandit import (
    Arm,
    ArmTable,
    Observation,
    Policy,
    Pull,
    StopRules,
    TaskSet,
    ask_within,
    make_policy,
)
from hpc_toolkit.bandit.arms import with_metrics
from hpc_toolkit.bandit.gp import (
    Hyperparameters,
    Posterior,
    column_scales,
    fit,
    log_expected_improvement,
    log_marginal_likelihoods,
    space_filling_order,
)
from hpc_toolkit.bandit.racing import best_row, gaps
from hpc_toolkit.bandit.rule import Stream, first_best
from hpc_toolkit.errors import ConfigError

PACKAGE = Path(hpc_toolkit.bandit.__file__).parent


def line(count: int) -> ArmTable:
    return ArmTable(tuple(Arm(str(i), f"g{i % 3}", (float(i),)) for i in range(count)), ("x",))


def test_of_values_that_are_equal_or_differ_by_rounding_the_first_is_taken() -> None:
    points = np.array([[0.0], [1.0], [2.0], [3.0], [4.0]])
    seed = next(s for s in range(99) if space_filling_order(points, s, 1) == [2])

    assert first_best([0.1, 0.3, 0.1 + 0.2, 0.3 - 1e-9]) == 1
    assert first_best([0.3, 0.3 + 1e-11]) == 1
    assert space_filling_order(points, seed, 5) == [2, 0, 4, 1, 3]  # the farthest point each time


@pytest.mark.parametrize(("beta", "places"), [(0, range(6, 11)), (2, range(91, 101))])
def test_gp_ucb_explores_as_far_as_beta_says(beta: float, places: range) -> None:
    table = line(101)
    policy = make_policy("gp-ucb", table, 0, beta=beta)
    for index in (0, 4, 8, 12, 16, 20):
        policy.tell(Observation(table.ids[index], {"task": -abs(index - 8) / 10}))

    assert table.index(policy.ask(1)[0].arm) in places


def test_streams_of_a_seed_share_no_numbers_whatever_follows_theirs() -> None:
    first = {stream: np.random.default_rng([5, stream]).random() for stream in Stream}
    later = {stream: np.random.default_rng([5, stream, 3]).random() for stream in Stream}

    for one, other in combinations([*first.values(), *later.values()], 2):
        assert one != other


def test_generators_of_the_package_name_their_stream() -> None:
    """All but the order of ``random``, whose searches are recorded."""
    unnamed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("default_rng"):
                words = ast.unparse(node.args[0])
                if "Stream." not in words and "stream" not in words:
                    unnamed.append((path.name, words))

    assert unnamed == [("rule.py", "[history.seed]")]


@pytest.mark.parametrize(
    ("name", "asked"),
    [("random", [4, 6, 10, 0, 1, 3, 8, 7, 2]), ("gp-ucb", [11, 0, 5, 8, 2, 7, 3, 9, 1])],
)
def test_searches_that_may_be_recorded_ask_as_they_always_did(name: str, asked: list[int]) -> None:
    policy = make_policy(name, line(12), 7)
    found = []
    for _ in asked:
        arm = int(policy.ask(1)[0].arm)
        found.append(arm)
        policy.tell(Observation(str(arm), {"task": math.sin(arm)}))

    assert found == asked


def told(policy: Policy, scores: dict[int, float]) -> Policy:
    for arm, score in scores.items():
        policy.tell(Observation(str(arm), {"task": score}))
    return policy


HILL = {0: 0.1, 10: 0.5, 20: 0.8, 30: 0.6, 45: 0.2, 60: 0.1}


def test_log_expected_improvement_agrees_with_numbers_of_any_precision() -> None:
    mpmath = pytest.importorskip("mpmath")
    z = np.array([-300.0, -60.0, -37.6, -30.5, -29.5, -12.0, -6.0, -1.0, 0.0, 0.5, 4.0, 20.0])
    sd = np.geomspace(1e-6, 10.0, len(z))
    with mpmath.workdps(200):
        exact = [
            float(mpmath.log(s * (mpmath.npdf(v) + v * mpmath.ncdf(v))))
            for v, s in zip(map(mpmath.mpf, z.tolist()), map(mpmath.mpf, sd.tolist()), strict=True)
        ]

    found = log_expected_improvement(0.25 + z * sd, sd, 0.25)

    np.testing.assert_allclose(found, exact, rtol=1e-8)


def test_gp_ei_maximises_the_improvement_over_the_best_mean() -> None:
    policy = told(make_policy("gp-ei", line(61), 0), HILL)
    values, points = np.array(list(HILL.values())), line(61).standardised[0]
    x, y = points[list(HILL)], (values - values.mean()) / values.std()
    posterior = Posterior(x, y, points, fit(x, y))
    best = posterior.mean[sorted(HILL)].max()
    improvement = log_expected_improvement(posterior.mean, posterior.sd, best)
    improvement[sorted(HILL)] = -math.inf

    chosen = policy.ask(1)[0]

    assert int(chosen.arm) == int(np.argmax(improvement))


@pytest.mark.parametrize(
    ("features", "columns"), [("all", [0, 1, 2, 3]), ("geometry", [0, 1]), ("metrics", [2, 3])]
)
def test_gp_ucb_maximises_the_bound_over_the_features_that_its_option_names(
    features: str, columns: list[int]
) -> None:
    rng = np.random.default_rng(6)
    given = rng.normal(size=(30, 4))
    arms = tuple(Arm(str(i), "g", (row[0], row[1])) for i, row in enumerate(given))
    rows = {str(i): {"c": row[2], "d": row[3]} for i, row in enumerate(given)}
    table = with_metrics(ArmTable(arms, ("a", "b")), rows, ["c", "d"])
    scores = {i: float(np.sin(3 * row[0]) + row[2]) for i, row in enumerate(given[:14])}
    values = np.array(list(scores.values()))
    points = table.standardised[0][:, columns]
    x, y = points[:14], (values - values.mean()) / values.std()
    posterior = Posterior(x, y, points, fit(x, y))
    bound = (posterior.mean + 2.0 * posterior.sd)[14:]

    chosen = told(make_policy("gp-ucb", table, 0, features=features), scores).ask(1)[0]

    assert int(chosen.arm) == 14 + int(np.argmax(bound))


@pytest.mark.parametrize("name", ["gp-ucb", "gp-ei"])
def test_gp_rules_do_not_depend_on_the_units_of_scores(name: str) -> None:
    def asked(factor: float) -> list[str]:
        scores = {arm: factor * (1e3 + score) for arm, score in HILL.items()}
        return [one.arm for one in told(make_policy(name, line(61), 5), scores).ask(4)]

    assert asked(1.0) == asked(8.0)


TASKS = TaskSet(("x", "y"), (1.0, 3.0))


def test_budget_of_gpu_seconds_adds_what_pending_tasks_are_expected_to_take() -> None:
    """Task x took 2 s once and 4 s once, so 3 s are expected; task y is expected by the set."""
    policy = make_policy("random", line(9), 0, tasks=TASKS, stop=StopRules(gpu_s=12.5))
    policy.tell(Observation("0", {"x": 0.5}, seconds={"x": 2.0}))
    policy.tell(Observation("1", failed=("x",), seconds={"x": 4.0}))

    assert policy.stop() is None
    assert policy.stop([Pull("2", ("x", "y"))]) is None
    assert policy.stop(["0", "1"]) is None
    assert policy.stop([Pull("2", ("x",)), Pull("3", ("x", "y"))]) == (
        "requested 15.0 s of GPU time, the budget is 12.5 s"
    )


@pytest.mark.parametrize("pending", [[], ["1", "2"]])
def test_ask_within_takes_what_asks_of_one_within_the_budget_would(pending: list[str]) -> None:
    policy = make_policy("random", line(9), 0, tasks=TASKS, stop=StopRules(evaluations=11))
    one_by_one: list[Any] = []
    while policy.stop([*pending, *one_by_one]) is None:
        one_by_one += policy.ask(1, [*pending, *one_by_one])

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
        ({"gpu_s": -0.1}, "stop: gpu_s is -0.1"),
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

    for row, mean, error in zip(scores, *found, strict=True):
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


def likelihood(x: np.ndarray, y: np.ndarray, hyper: Hyperparameters) -> float:
    return float(log_marginal_likelihoods(x, y, [hyper])[0])


RNG = np.random.default_rng(11)
X = RNG.normal(size=(40, 3))
Y = np.sin(X[:, 0]) + 0.3 * X[:, 1] + 0.05 * RNG.normal(size=40)
POINTS = np.vstack([RNG.normal(size=(200, 3)), X[:5]])
HYPER = [Hyperparameters(0.4, 1e-3), Hyperparameters(1.5, 1e-2), Hyperparameters(6.0, 1e-4)]


@pytest.mark.parametrize("hyper", HYPER, ids=str)
def test_posterior_agrees_with_scikit_learn(hyper: Hyperparameters) -> None:
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    kernel = gaussian_process.kernels.Matern(length_scale=hyper.length_scale, nu=2.5)
    oracle = gaussian_process.GaussianProcessRegressor(kernel, alpha=hyper.noise, optimizer=None)
    mean, covariance = oracle.fit(X, Y).predict(POINTS, return_cov=True)

    posterior = Posterior(X, Y, POINTS, hyper)

    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.variance, np.diag(covariance), atol=1e-6)
    expected = oracle.log_marginal_likelihood_value_
    assert likelihood(X, Y, hyper) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("hyper", HYPER)
def test_believe_equals_an_observation_at_the_mean(hyper: Hyperparameters) -> None:
    """The kriging believer, checked against a posterior that was really given such data."""
    posterior = Posterior(X, Y, POINTS, hyper)
    mean = posterior.mean.copy()
    believed = [3, 150, 77]
    x, y = np.vstack([X, POINTS[believed]]), np.concatenate([Y, mean[believed]])

    for index in believed:
        posterior.believe(index)

    expected = Posterior(x, y, POINTS, hyper)
    np.testing.assert_array_equal(posterior.mean, mean)
    np.testing.assert_allclose(expected.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.variance, expected.variance, atol=1e-8)


def test_likelihood_of_repeated_points_without_noise_takes_jitter_for_that_one_alone() -> None:
    x, y = np.zeros((4, 1)), np.array([1.0, 1.0, 1.0, 1.0])

    singular, plain = log_marginal_likelihoods(
        x, y, [Hyperparameters(1.0, 0.0), Hyperparameters(1.0, 0.1)]
    )

    assert np.isfinite(singular)
    assert plain == pytest.approx(likelihood(x, y, Hyperparameters(1.0, 0.1)), rel=1e-12)


def test_columns_that_matter_count_more_if_rewards_clearly_say_so() -> None:
    draws = np.random.default_rng(0)
    x = draws.standard_normal((60, 3))
    y = np.sin(3 * x[:, 0]) + 0.01 * draws.standard_normal(60)

    scales = column_scales(x, (y - y.mean()) / y.std())

    assert scales[0] > 2 * max(scales[1], scales[2])
    assert column_scales(x[:, ::-1], (y - y.mean()) / y.std())[::-1] == pytest.approx(scales)
    # Six rewards without a pattern single nothing out.
    assert column_scales(x[:6], draws.standard_normal(6)) == pytest.approx(np.ones(3))
