"""Metrics against known answers, identities and a slow reference; each error named."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import (
    alpha_req,
    anisotropy,
    curvature,
    effective_rank,
    linear_cka,
    matrix_entropy,
    rankme,
    two_nn,
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


Method = Literal["mle", "linear"]
METHODS: tuple[Method, ...] = ("mle", "linear")


def test_two_nn_of_four_points_on_a_line_is_what_the_formula_gives() -> None:
    # Distances to the nearest two: (1, 3), (1, 2), (2, 3), (4, 6): ratios 3, 2, 1.5, 1.5.
    z = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    logs = np.log([1.5, 1.5, 2.0, 3.0])

    assert float(two_nn(z, discard=0.0)) == pytest.approx(3 / logs.sum(), rel=1e-14)
    censored = 2 / (logs[:3].sum() + logs[2])
    assert float(two_nn(z, discard=0.25)) == pytest.approx(censored, rel=1e-14)
    rise = -np.log(1 - np.array([1, 2, 3]) / 4)
    slope = (rise * logs[:3]).sum() / (logs[:3] ** 2).sum()
    assert float(two_nn(z, method="linear", discard=0.25)) == pytest.approx(slope, rel=1e-14)


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.integers(4, 30),
    st.integers(1, 8),
    st.sampled_from(METHODS),
    st.sampled_from([0.1, 0.3, 0.5]),
)
def test_two_nn_agrees_with_the_slow_reference(
    seed: int, n: int, d: int, method: Method, discard: float
) -> None:
    z = slow.random_rows(seed, n, d)

    got = float(two_nn(torch.from_numpy(z), method=method, discard=discard))

    assert got == pytest.approx(slow.two_nn(z, method, discard), rel=1e-9)
    assert got > 0


def test_two_nn_counts_equal_rows_once() -> None:
    z = torch.from_numpy(slow.random_rows(2, 20, 3))
    zero = torch.zeros(1, 3, dtype=torch.float64)

    assert float(two_nn(torch.cat([z, z[:7], z[:1]]))) == float(two_nn(z))
    assert float(two_nn(torch.cat([z, zero, -zero]))) == float(two_nn(torch.cat([z, zero])))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_two_nn_counts_rows_once_that_rounding_alone_tells_apart(
    method: Method, share: float
) -> None:
    z = torch.from_numpy(slow.random_rows(8, 500, 16)).float()
    draws = np.random.default_rng(9).normal(size=(round(share * 500), 16))
    again = (z[: len(draws)] * (1 + 6e-8 * torch.from_numpy(draws))).float()

    got = float(two_nn(torch.cat([z, again]), method=method))

    assert got == pytest.approx(float(two_nn(z, method=method)), rel=1e-4)


def test_two_nn_without_a_tolerance_counts_every_row_that_is_not_equal() -> None:
    # Distances to the nearest two: (e, 1), (e, 1 - e), (1 - e, 1), (2, 3 - e), with e small.
    e = 1e-5
    z = torch.tensor([[0.0], [e], [1.0], [3.0]], dtype=torch.float64)
    logs = np.log(sorted([1 / e, (1 - e) / e, 1 / (1 - e), (3 - e) / 2]))

    assert float(two_nn(z, discard=0.0, tolerance=0.0)) == pytest.approx(3 / logs.sum(), rel=1e-9)
    once = np.log([3.0, 2.0, 1.5])  # 0, 1 and 3
    assert float(two_nn(z, discard=0.0)) == pytest.approx(2 / once.sum(), rel=1e-4)


def test_two_nn_tells_near_neighbours_apart_far_from_the_origin() -> None:
    z = torch.from_numpy(slow.random_rows(3, 40, 3))
    far = z * 2.0**-20 + 2.0**10  # |a|^2 + |b|^2 - 2 a b would leave no digit of the distances

    near = float(two_nn((far - 2.0**10) * 2.0**20))

    assert float(two_nn(far)) == pytest.approx(near, rel=1e-12)


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (torch.eye(2), {}, r"at least 3 rows"),
        (torch.ones(9, 2), {}, "needs 3 different rows, got 1"),
        (torch.tensor([[0.0], [-0.0], [1.0], [1.0]]), {}, "different rows, got 2"),
        (torch.eye(9), {}, "at equal distances"),
        (torch.eye(5), {"discard": 0.9}, "0 of 5 ratios left"),
        (torch.eye(5), {"discard": 1.0}, r"at least 0 and below 1, got 1\.0"),
        (torch.eye(5), {"discard": torch.nan}, "got nan"),
        (torch.eye(5), {"tolerance": -1e-3}, r"at least 0 and below 1, got -0\.001"),
        (torch.eye(5), {"tolerance": torch.nan}, "got nan"),
        (torch.eye(5), {"method": "mean"}, "unknown method 'mean'"),
        (
            torch.tensor([[1.0], [2e-200], [1e-200], [0.0]], dtype=torch.float64),
            {},
            "needs 3 different rows, got 2",
        ),
    ],
)
def test_two_nn_that_is_not_defined_is_named(z: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        two_nn(z, **options)


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


def pair(seed: int, n: int, d1: int, d2: int) -> Any:
    x, y = slow.random_rows(seed, n, d1), slow.random_rows(seed + 1, n, d2)
    y[:, : min(d1, d2)] += x[:, : min(d1, d2)]  # related, so that nothing is near 0
    return torch.from_numpy(x), torch.from_numpy(y)


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


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.eye(4), torch.eye(5), r"the same rows, got shapes \(4, 4\) and \(5, 5\)"),
        (torch.ones(4, 2), torch.eye(4), "all rows of the first representation are equal"),
        (torch.eye(4), torch.full((4, 2), 1e9 / 3), "all rows of the second"),
        (torch.eye(1), torch.eye(1), "all rows of the first"),
    ],
)
def test_cka_that_is_not_defined_is_named(x: Any, y: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cka(x, y)


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
