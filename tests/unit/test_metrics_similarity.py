"""Linear CKA against known answers, identities, a slow reference and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import linear_cka
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SHAPES = [(30, 5, 8), (8, 30, 5), (8, 5, 30), (8, 20, 30), (2, 3, 4), (10, 10, 10)]


def pair(seed: int, n: int, d1: int, d2: int) -> Any:
    x, y = slow.random_rows(seed, n, d1), slow.random_rows(seed + 1, n, d2)
    y[:, : min(d1, d2)] += x[:, : min(d1, d2)]  # related, so that nothing is near 0
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("shape", SHAPES)
def test_cka_of_a_representation_turned_scaled_and_moved_is_one(shape: tuple[int, ...]) -> None:
    x, _ = pair(0, *shape)
    turned = x @ torch.from_numpy(slow.rotation(3, x.shape[1])) * -7 + 5

    assert float(linear_cka(x, turned)) == pytest.approx(1.0, abs=1e-12)


def test_cka_of_orthogonal_representations_is_zero() -> None:
    basis = torch.from_numpy(slow.with_spectrum(1, 20, np.ones(8), centred=True))

    assert float(linear_cka(basis[:, :4], basis[:, 4:])) < 0.7  # a rotation mixes the columns
    left = torch.linalg.svd(basis - basis.mean(0)).U
    assert float(linear_cka(left[:, :4], left[:, 4:8])) == pytest.approx(0.0, abs=1e-12)


def test_cka_of_unrelated_representations_is_about_their_width_over_n() -> None:
    x, y = (torch.from_numpy(np.random.default_rng(s).normal(size=(4000, 10))) for s in (1, 2))

    assert 0.3 * 10 / 4000 < float(linear_cka(x, y)) < 3 * 10 / 4000


def test_cka_of_two_directions_is_the_squared_cosine_of_their_columns() -> None:
    x = torch.tensor([[1.0], [-1.0], [0.0], [0.0]])
    y = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])

    assert float(linear_cka(x, y)) == pytest.approx(0.5, abs=1e-15)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 12), st.integers(1, 12))
def test_cka_agrees_with_the_slow_reference_and_stays_in_bounds(
    seed: int, n: int, d1: int, d2: int
) -> None:
    x, y = pair(seed, n, d1, d2)

    got = float(linear_cka(x, y))

    assert got == pytest.approx(slow.linear_cka(x.numpy(), y.numpy()), abs=1e-12)
    assert 0 <= got <= 1
    assert float(linear_cka(y, x)) == pytest.approx(got, abs=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.sampled_from(SHAPES), st.floats(-300, 300), st.floats(-300, 300))
def test_cka_is_unchanged_by_scale_and_order(
    seed: int, shape: tuple[int, int, int], one: float, other: float
) -> None:
    x, y = pair(seed, *shape)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))

    expected = float(linear_cka(x, y))

    assert float(linear_cka(x * 10**one, y * 10**other)) == pytest.approx(expected, abs=1e-12)
    assert float(linear_cka(x[order], y[order])) == pytest.approx(expected, abs=1e-12)


def test_cka_agrees_with_centred_kernels_of_scikit_learn() -> None:
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    x, y = pair(4, 50, 20, 70)

    k, m = (
        preprocessing.KernelCenterer().fit_transform(pairwise.linear_kernel(rows.numpy()))
        for rows in (x, y)
    )
    expected = (k * m).sum() / np.sqrt((k * k).sum() * (m * m).sum())

    assert float(linear_cka(x, y)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.eye(4), torch.eye(5), r"the same rows, got shapes \(4, 4\) and \(5, 5\)"),
        (torch.ones(4, 2), torch.eye(4), "all rows of the first representation are equal"),
        (torch.eye(4), torch.full((4, 2), 1e9 / 3), "all rows of the second"),
        (torch.eye(1), torch.eye(1), "all rows of the first"),
        (torch.full((2, 2), torch.inf), torch.eye(2), "holds NaN or infinite"),
    ],
)
def test_cka_that_is_not_defined_is_named(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cka(x, y)
