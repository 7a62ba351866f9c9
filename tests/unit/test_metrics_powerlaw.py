"""alpha-ReQ against planted spectra, a slow reference and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import alpha_req
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def planted(exponent: float, *, n: int = 200, d: int = 120, centred: bool = True) -> Any:
    values = np.arange(1, d + 1) ** (-exponent / 2)
    return torch.from_numpy(slow.with_spectrum(7, n, values, centred=centred))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.5, 8.0])
def test_alpha_req_of_a_planted_power_law_is_its_exponent(exponent: float) -> None:
    assert float(alpha_req(planted(exponent))) == pytest.approx(exponent, abs=1e-9)


@pytest.mark.parametrize(("n", "d"), [(9, 40), (40, 9), (20, 20)])
def test_alpha_req_of_few_eigenvalues_fits_those_that_there_are(n: int, d: int) -> None:
    values = np.arange(1, min(n - 1, d) + 1) ** -0.75
    rows = slow.with_spectrum(3, n, values, centred=True)
    wide = torch.from_numpy(np.pad(rows, ((0, 0), (0, max(0, d - rows.shape[1])))))

    assert float(alpha_req(wide)) == pytest.approx(1.5, abs=1e-9)


def test_alpha_req_reads_eigenvalues_6_to_100_alone() -> None:
    values = np.arange(1, 121) ** -0.5
    values[:5] *= 30
    values[100:] *= 0.1

    z = torch.from_numpy(slow.with_spectrum(5, 200, values, centred=True))

    assert float(alpha_req(z)) == pytest.approx(1.0, abs=1e-9)
    assert float(alpha_req(z, first=5)) > 1.1
    assert float(alpha_req(z, last=101)) > 1.01


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(8, 40), st.integers(8, 40), st.integers(1, 4))
def test_alpha_req_agrees_with_the_slow_reference(seed: int, n: int, d: int, first: int) -> None:
    z = slow.random_rows(seed, n, d)

    got = float(alpha_req(torch.from_numpy(z), first=first))

    assert got == pytest.approx(slow.alpha_req(z, first, 100), rel=1e-8)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(-250, 250))
def test_alpha_req_is_unchanged_by_scale_rotation_and_translation(
    seed: int, exponent: float
) -> None:
    z = slow.random_rows(seed, 30, 12)
    moved = (z @ slow.rotation(seed, 12) + 3.0) * 10.0**exponent

    expected = float(alpha_req(torch.from_numpy(z)))

    assert float(alpha_req(torch.from_numpy(moved))) == pytest.approx(expected, rel=1e-9)


def test_alpha_req_without_centring_reads_the_mean_as_a_direction() -> None:
    z = planted(1.0, centred=False)

    assert float(alpha_req(z, center=False)) == pytest.approx(1.0, abs=1e-9)
    assert float(alpha_req(z)) != pytest.approx(1.0, abs=1e-6)


def test_alpha_req_of_a_batch_is_that_of_each_matrix() -> None:
    z = torch.from_numpy(slow.random_rows(1, 4, 30, 15)).reshape(2, 2, 30, 15)
    z[1, 1, :, 10:] = 0  # of lower rank, so that its fit ends earlier

    together = alpha_req(z)

    alone = [[float(alpha_req(one)) for one in row] for row in z]
    assert together.tolist() == pytest.approx(np.array(alone))


def test_alpha_req_agrees_with_a_weighted_regression_of_scikit_learn() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    linear = pytest.importorskip("sklearn.linear_model")
    z = slow.random_rows(11, 300, 110)

    values = decomposition.PCA().fit(z).explained_variance_
    number = np.arange(6, 101)
    fit = linear.LinearRegression().fit(
        np.log(number)[:, None], np.log(values[5:100]), sample_weight=1 / number
    )

    assert float(alpha_req(torch.from_numpy(z))) == pytest.approx(-fit.coef_[0], rel=1e-9)


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (torch.eye(8), {}, "needs 3 eigenvalues from number 6 on, got 2"),
        (torch.zeros(20, 20), {}, "from number 6 on, got 0"),
        (torch.ones(20, 20), {}, "from number 6 on, got 0"),
        (torch.eye(20), {"first": 0}, "range of a fit is 1 <= first <= last - 2, got 0 to 100"),
        (torch.eye(20), {"first": 9, "last": 10}, "got 9 to 10"),
        (torch.full((20, 20), torch.nan), {}, "holds NaN"),
        (torch.zeros(20), {}, r"got shape \(20,\)"),
    ],
)
def test_alpha_req_that_cannot_be_fitted_is_named(z: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alpha_req(z, **options)
