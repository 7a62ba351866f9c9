from __future__ import annotations

import math

import numpy as np
import pytest

from hpc_toolkit.bandit.gp import (
    Hyperparameters,
    Posterior,
    column_scales,
    log_marginal_likelihoods,
    matern52,
)


def likelihood(x: np.ndarray, y: np.ndarray, hyper: Hyperparameters) -> float:
    return float(log_marginal_likelihoods(x, y, [hyper])[0])


RNG = np.random.default_rng(11)
X = RNG.normal(size=(40, 3))
Y = np.sin(X[:, 0]) + 0.3 * X[:, 1] + 0.05 * RNG.normal(size=40)
POINTS = np.vstack([RNG.normal(size=(200, 3)), X[:5]])
HYPER = [Hyperparameters(0.4, 1e-3), Hyperparameters(1.5, 1e-2), Hyperparameters(6.0, 1e-4)]


def test_matern52_has_the_published_values() -> None:
    near, far = np.zeros((1, 2)), np.array([[3.0, 4.0]])

    r = math.sqrt(5) * 5 / 2.0

    assert matern52(near, far, 2.0)[0, 0] == pytest.approx((1 + r + r * r / 3) * math.exp(-r))
    assert matern52(far, far, 2.0)[0, 0] == 1.0


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
