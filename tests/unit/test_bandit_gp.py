from __future__ import annotations

import math

import numpy as np
import pytest

from hpc_toolkit.bandit.gp import (
    LENGTH_SCALES,
    NOISES,
    Hyperparameters,
    Posterior,
    cholesky,
    fit,
    log_marginal_likelihood,
    matern52,
)

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


@pytest.mark.parametrize("hyper", HYPER)
def test_posterior_agrees_with_scikit_learn(hyper: Hyperparameters) -> None:
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    kernel = gaussian_process.kernels.Matern(length_scale=hyper.length_scale, nu=2.5)
    oracle = gaussian_process.GaussianProcessRegressor(kernel, alpha=hyper.noise, optimizer=None)
    mean, sd = oracle.fit(X, Y).predict(POINTS, return_std=True)

    posterior = Posterior(X, Y, POINTS, hyper)

    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.sd, sd, atol=1e-6)
    likelihood = oracle.log_marginal_likelihood_value_
    assert log_marginal_likelihood(X, Y, hyper) == pytest.approx(likelihood, abs=1e-6)


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


def test_believe_in_any_order_gives_the_same_variance() -> None:
    first, second = (Posterior(X, Y, POINTS, HYPER[1]) for _ in range(2))

    for index in (1, 2, 3):
        first.believe(index)
        second.believe(4 - index)

    np.testing.assert_allclose(first.variance, second.variance, atol=1e-12)


def test_fit_chooses_the_highest_marginal_likelihood_of_the_grid() -> None:
    grid = [Hyperparameters(scale, noise) for scale in LENGTH_SCALES for noise in NOISES]

    best = fit(X, Y)

    assert best in grid
    assert log_marginal_likelihood(X, Y, best) >= max(
        log_marginal_likelihood(X, Y, hyper) - 1e-8 for hyper in grid
    )


def test_fit_follows_the_smoothness_of_the_data() -> None:
    x = np.linspace(-2, 2, 60)[:, None]

    smooth, rough = fit(x, np.sin(x[:, 0])), fit(x, np.sin(9 * x[:, 0]))

    assert smooth.length_scale > rough.length_scale


def test_cholesky_of_repeated_points_without_noise_takes_jitter() -> None:
    kernel = matern52(np.zeros((5, 2)), np.zeros((5, 2)), 1.0)

    factor = cholesky(kernel, 0.0)

    np.testing.assert_allclose(factor @ factor.T, kernel, atol=1e-4)


def test_cholesky_of_a_matrix_beyond_repair_is_an_error() -> None:
    with pytest.raises(np.linalg.LinAlgError, match="2 points is not positive definite"):
        cholesky(np.array([[1.0, 2.0], [2.0, 1.0]]), 0.01)


def test_posterior_variance_at_an_observed_point_is_at_most_the_noise() -> None:
    posterior = Posterior(X, Y, X, Hyperparameters(6.0, 1e-4))

    assert posterior.variance.min() > 0.0
    assert posterior.variance.max() <= 1e-4


def test_posterior_variance_is_never_negative_without_noise() -> None:
    posterior = Posterior(X, Y, X, Hyperparameters(1.5, 0.0))

    assert posterior.variance.min() >= 0.0
    for index in range(3):
        posterior.believe(index)
    assert posterior.variance.min() >= 0.0
