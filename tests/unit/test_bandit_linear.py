from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from hpc_toolkit.bandit import Arm, ArmTable, Observation, make_policy
from hpc_toolkit.bandit.regression import Ridge, design

RNG = np.random.default_rng(5)
X = RNG.normal(size=(30, 4))
Y = X @ [1.0, -2.0, 0.0, 0.5] + 0.1 * RNG.normal(size=30)


def line(count: int) -> ArmTable:
    return ArmTable(tuple(Arm(str(i), "g", (float(i),)) for i in range(count)), ("x",))


@pytest.mark.parametrize("ridge", [1e-3, 1.0, 30.0])
def test_ridge_is_least_squares_with_the_prior_as_further_rows(ridge: float) -> None:
    rows = np.vstack([X, math.sqrt(ridge) * np.eye(4)])
    expected = np.linalg.lstsq(rows, np.concatenate([Y, np.zeros(4)]), rcond=None)[0]
    inverse = np.linalg.pinv(rows) @ np.linalg.pinv(rows).T
    points = RNG.normal(size=(50, 4))

    model = Ridge(X, Y, ridge)

    np.testing.assert_allclose(model.theta, expected, atol=1e-10)
    variance = np.einsum("ij,jk,ik->i", points, inverse, points)
    np.testing.assert_allclose(model.sd(points), np.sqrt(variance), atol=1e-10)


def test_ridge_believes_as_if_it_had_observed_its_prediction() -> None:
    model, theta = Ridge(X, Y, 1.0), Ridge(X, Y, 1.0).theta
    point = np.array([0.3, 2.0, -1.0, 0.0])

    model.believe(point)

    expected = Ridge(np.vstack([X, point]), np.append(Y, point @ theta), 1.0)
    np.testing.assert_allclose(expected.theta, theta, atol=1e-10)
    np.testing.assert_allclose(model.theta, theta, atol=0)
    np.testing.assert_allclose(model.sd(X), expected.sd(X), atol=1e-12)


def test_ridge_draws_have_the_posterior_mean_and_covariance() -> None:
    model, generator = Ridge(X, Y, 1.0), np.random.default_rng(0)

    draws = np.array([model.draw(2.0, generator) for _ in range(20000)])

    covariance = 4.0 * np.linalg.inv(X.T @ X + np.eye(4))
    sd = np.sqrt(np.diag(covariance))
    assert (np.abs(draws.mean(axis=0) - model.theta) < 5 * sd / 141).all()
    assert (np.abs(np.cov(draws.T) - covariance) < 5 * 1.5 * np.outer(sd, sd) / 141).all()


def test_design_of_degree_two_has_squares_and_products_once_and_no_constants() -> None:
    points = np.column_stack([RNG.normal(size=20), RNG.normal(size=20), np.full(20, 7.0)])

    linear, quadratic = design(points, 1), design(points, 2)

    a, b = points[:, 0], points[:, 1]
    # The products with the constant column are the columns again, and stay.
    terms = [a, b, a * a, a * b, 7.0 * a, b * b, 7.0 * b]
    expected = [np.ones(20), *((term - term.mean()) / term.std() for term in terms)]
    np.testing.assert_allclose(quadratic, np.array(expected).T, atol=1e-12)
    np.testing.assert_allclose(linear, np.array(expected[:3]).T, atol=1e-12)


def test_design_without_columns_is_a_constant() -> None:
    assert design(np.zeros((3, 0)), 2).tolist() == [[1.0], [1.0], [1.0]]


def test_linucb_maximises_the_published_bound_with_one_theta_for_all_arms() -> None:
    arms = [Arm(f"{i}{j}", f"{i}", (float(i), float(j))) for i in range(4) for j in range(4)]
    table = ArmTable(tuple(arms), ("a", "b"))
    policy = make_policy("linucb", table, 0, alpha=1.5, degree=1, initial=1)
    told = {"00": 0.1, "12": 0.4, "30": 0.5, "21": 0.2}
    for arm, score in told.items():
        policy.tell(Observation(arm, {"task": score}))
    x = np.column_stack([np.ones(16), (table.features - 1.5) / table.features.std(axis=0)])
    rows, y = x[[table.index(arm) for arm in told]], np.array(list(told.values()))
    inverse = np.linalg.inv(np.eye(3) + rows.T @ rows)
    mean = x @ inverse @ rows.T @ ((y - y.mean()) / y.std())
    bound = mean + 1.5 * np.sqrt(np.einsum("ij,jk,ik->i", x, inverse, x))
    bound[[table.index(arm) for arm in told]] = -math.inf

    chosen = policy.ask(1)[0]

    assert chosen.arm == table.ids[int(np.argmax(bound))]
    assert chosen.acquisition == pytest.approx(y.mean() + y.std() * bound.max())


@pytest.mark.parametrize("name", ["linucb", "lints"])
def test_linear_policies_of_degree_two_find_a_best_arm_in_the_middle(name: str) -> None:
    table = line(101)
    policy = make_policy(name, table, 1)

    for _ in range(25):
        arm = policy.ask(1)[0].arm
        policy.tell(Observation(arm, {"task": 1.0 - ((float(arm) - 61) / 50) ** 2}))

    best = policy.best()
    assert best is not None
    assert abs(int(best.arm) - 61) <= 2


def test_linucb_pending_arms_lower_the_bounds_around_them() -> None:
    table = line(41)
    policy = make_policy("linucb", table, 0, initial=1, degree=1, alpha=3.0)
    policy.tell(Observation("20", {"task": 0.5}))

    first, second = policy.ask(2)

    assert {first.arm, second.arm} == {"0", "40"}
    assert policy.ask(1, [first.arm])[0].arm == second.arm


def test_lints_proposals_of_one_ask_are_draws_of_their_own() -> None:
    table = line(200)
    policy = make_policy("lints", table, 0, initial=1, width=3.0, degree=1)
    for arm in ("0", "199"):
        policy.tell(Observation(arm, {"task": 0.5}))

    chosen = {int(proposal.arm) > 100 for proposal in policy.ask(12)}

    assert chosen == {False, True}


def test_lints_of_width_zero_is_greedy() -> None:
    table = line(21)
    policy = make_policy("lints", table, 0, initial=1, width=0, degree=1)
    for i in range(3, 8):
        policy.tell(Observation(str(i), {"task": i / 10}))

    assert [proposal.arm for proposal in policy.ask(3)] == ["20", "19", "18"]


def test_linear_policies_do_not_depend_on_the_units_of_features() -> None:
    def asked(scale: float) -> list[str]:
        arms = [
            Arm(f"{i}{j}", "g", (i * scale, float(j)))
            for i, j in itertools.product(range(5), range(5))
        ]
        policy = make_policy("linucb", ArmTable(tuple(arms), ("a", "b")), 3)
        for arm in ("00", "13", "42", "31", "24", "11"):
            policy.tell(Observation(arm, {"task": (int(arm) % 7) / 7}))
        return [proposal.arm for proposal in policy.ask(4)]

    assert asked(1.0) == asked(1024.0)
