"""Metrics against known answers, identities and a slow reference; each error named."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import (
    alpha_req,
    anisotropy,
    curvature,
    effective_rank,
    matrix_entropy,
    rankme,
)
from hpc_toolkit.science.metrics.geometry import CurvatureVariant
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

sizes = st.tuples(st.integers(0, 10**6), st.integers(3, 20), st.integers(2, 20))


def random_rows(seed: int, n: int, d: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


VARIANTS: tuple[CurvatureVariant, ...] = ("difference", "difference-abs", "token-angle")


@settings(deadline=None, max_examples=50)
@given(sizes)
def test_anisotropy_agrees_with_all_pairs_and_ignores_row_lengths(
    size: tuple[int, int, int],
) -> None:
    z = random_rows(*size)
    scaled = z * torch.linspace(0.01, 100, len(z), dtype=torch.float64).unsqueeze(-1)

    assert float(anisotropy(z)) == pytest.approx(slow.anisotropy(z.numpy()), abs=1e-12)
    assert float(anisotropy(scaled)) == pytest.approx(float(anisotropy(z)), abs=1e-12)


def test_anisotropy_leaves_zero_rows_out() -> None:
    z = random_rows(0, 5, 4)

    assert float(anisotropy(torch.cat([z, torch.zeros(3, 4)]))) == pytest.approx(
        float(anisotropy(z))
    )


@pytest.mark.parametrize("step", [1e-6, math.pi / 6, 3.0, math.pi - 1e-6])
def test_curvature_of_a_circle_is_its_step(step: float) -> None:
    angles = torch.arange(9, dtype=torch.float64) * step
    z = torch.stack([angles.cos(), angles.sin()], dim=-1) * 10

    # Coordinates near 10 carry errors of 1e-15, steps of 1e-5 therefore of 1e-10.
    assert float(curvature(z)) == pytest.approx(step, abs=1e-9)


def test_curvature_with_absolute_cosines_takes_turning_back_for_straight() -> None:
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # turns by 135 degrees
    zigzag = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])

    assert float(curvature(corner)) == pytest.approx(3 * math.pi / 4, abs=1e-15)
    assert float(curvature(corner, variant="difference-abs")) == pytest.approx(math.pi / 4)
    assert float(curvature(zigzag, variant="difference-abs")) == pytest.approx(0, abs=1e-15)


@settings(deadline=None, max_examples=50)
@given(sizes, st.sampled_from(VARIANTS), st.floats(-250, 250))
def test_curvature_agrees_with_the_slow_reference_and_ignores_shift_scale_and_rotation(
    size: tuple[int, int, int], variant: CurvatureVariant, exponent: float
) -> None:
    z = random_rows(*size)
    turned = z @ torch.from_numpy(slow.rotation(size[0], size[2]))

    value = float(curvature(z, variant=variant))

    assert value == pytest.approx(slow.curvature(z.numpy(), variant), abs=1e-6)
    moved = float(curvature((turned + 3) * 10.0**exponent, variant=variant))
    assert moved == pytest.approx(value, abs=1e-9)
    assert 0 <= value <= math.pi / (2 if variant == "difference-abs" else 1)


def test_curvature_leaves_out_steps_of_length_zero() -> None:
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    paused = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    halfway = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])

    assert float(curvature(paused)) == pytest.approx(float(curvature(corner)))
    assert float(curvature(halfway)) == 0
    assert float(curvature(torch.ones(5, 2))) == 0


def planted(exponent: float, *, n: int = 200, d: int = 120, centred: bool = True) -> Any:
    values = np.arange(1, d + 1) ** (-exponent / 2)
    return torch.from_numpy(slow.with_spectrum(7, n, values, centred=centred))


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


def test_alpha_req_without_centring_reads_the_mean_as_a_direction() -> None:
    z = planted(1.0, centred=False)

    assert float(alpha_req(z, center=False)) == pytest.approx(1.0, abs=1e-9)
    assert float(alpha_req(z)) != pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (torch.eye(8), {}, "needs 3 eigenvalues from number 6 on, got 2"),
        (torch.zeros(20, 20), {}, "from number 6 on, got 0"),
        (torch.ones(20, 20), {}, "from number 6 on, got 0"),
        (torch.eye(20), {"first": 0}, "range of a fit is 1 <= first <= last - 2, got 0 to 100"),
        (torch.eye(20), {"first": 9, "last": 10}, "got 9 to 10"),
        (torch.zeros(20), {}, r"got shape \(20,\)"),
    ],
)
def test_alpha_req_that_cannot_be_fitted_is_named(z: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alpha_req(z, **options)


def rotation(seed: int, d: int) -> Any:
    return torch.from_numpy(slow.rotation(seed, d))


shapes = st.tuples(st.integers(0, 10**6), st.integers(2, 24), st.integers(2, 24))


@settings(deadline=None, max_examples=50)
@given(shapes, st.booleans(), st.booleans())
def test_entropy_agrees_with_the_slow_reference(
    size: tuple[int, int, int], center: bool, unit_rows: bool
) -> None:
    z = random_rows(*size)
    expected = slow.entropy(z.numpy(), center=center, unit_rows=unit_rows)

    got = float(matrix_entropy(z, center=center, unit_rows=unit_rows))

    assert got == pytest.approx(expected, abs=1e-9)


def test_entropy_normalisation_divides_by_the_maximum() -> None:
    z = random_rows(0, 9, 4)

    ratio = matrix_entropy(z) / matrix_entropy(z, normalize="max")

    assert float(ratio) == pytest.approx(math.log(4))


@pytest.mark.parametrize("n", [1, 7])
def test_entropy_of_equal_rows_after_centring_is_zero_not_noise(n: int) -> None:
    row = random_rows(3, 1, 16) * 1e3

    assert float(matrix_entropy(row.repeat(n, 1), center=True, normalize="max")) == 0


def test_entropy_takes_a_row_at_the_mean_as_zero_not_as_a_direction_of_noise() -> None:
    mean, step = random_rows(4, 2, 16)
    z = torch.stack([mean + step, mean - step, mean]) * 1e3

    assert float(matrix_entropy(z, center=True)) == pytest.approx(0, abs=1e-12)


def test_entropy_of_a_long_gram_reads_the_eigenvalues_not_clamped_entries() -> None:
    z = random_rows(0, 200, 64)

    got = float(matrix_entropy(z, unit_rows=False))

    assert got == pytest.approx(slow.entropy(z.numpy(), center=False, unit_rows=False))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: matrix_entropy(torch.eye(3), normalize="maxx"), "unknown normalisation 'maxx'"),  # type: ignore[arg-type]
        (lambda: matrix_entropy(torch.zeros(0, 3)), r"got shape \(0, 3\)"),
        (lambda: matrix_entropy(torch.zeros(3)), r"got shape \(3,\)"),
    ],
)
def test_unusable_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@settings(deadline=None, max_examples=50)
@given(shapes, st.booleans())
def test_ranks_agree_with_the_slow_reference(size: tuple[int, int, int], center: bool) -> None:
    z = random_rows(*size)
    array = z.numpy() - z.numpy().mean(axis=0) * center

    assert float(effective_rank(z, center=center)) == pytest.approx(slow.rank(array, 0.0), rel=1e-9)
    assert float(rankme(z)) == pytest.approx(slow.rank(z.numpy(), 1e-7), rel=1e-9)


def test_ranks_keep_small_singular_values_of_an_ill_conditioned_matrix() -> None:
    s = np.concatenate([np.ones(40), np.full(20, 1e-6)])
    z = rotation(1, 60) @ torch.diag(torch.from_numpy(s)) @ rotation(2, 60)

    p = s / s.sum()

    expected = math.exp(-(p * np.log(p)).sum())
    assert float(effective_rank(z)) == pytest.approx(expected, rel=1e-9)


def test_ranks_of_a_zero_matrix_are_zero() -> None:
    z = torch.zeros(4, 3)

    assert (float(effective_rank(z)), float(rankme(z))) == (0.0, 0.0)
