"""Anisotropy and curvature against known answers, identities and a slow reference."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import METRICS, anisotropy, curvature, masked_mean
from hpc_toolkit.science.metrics.geometry import CurvatureVariant, anisotropy_of_sum, unit_row_sum
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

sizes = st.tuples(st.integers(0, 10**6), st.integers(3, 20), st.integers(2, 20))


def random_rows(seed: int, n: int, d: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


VARIANTS: tuple[CurvatureVariant, ...] = ("difference", "difference-abs", "token-angle")


def test_anisotropy_of_equal_rows_is_one_and_of_orthogonal_rows_zero() -> None:
    assert float(anisotropy(torch.ones(5, 3))) == pytest.approx(1)
    assert float(anisotropy(torch.eye(6))) == pytest.approx(0, abs=1e-15)
    assert float(anisotropy(torch.tensor([[1.0, 2.0], [-1.0, -2.0]]))) == pytest.approx(-1)


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


def test_anisotropy_of_parts_adds_up_to_the_whole() -> None:
    z = random_rows(1, 10, 4)
    padded = torch.stack([z[:5], torch.cat([z[5:9], torch.full((1, 4), 7.0)])])

    totals, counts = unit_row_sum(padded, torch.tensor([5, 4]))

    assert float(anisotropy_of_sum(totals.sum(0), counts.sum())) == pytest.approx(
        float(anisotropy(z[:9]))
    )


def test_anisotropy_without_a_pair_is_named() -> None:
    with pytest.raises(ValueError, match="at least 2 rows that are not zero, got 1"):
        anisotropy(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("step", [1e-6, math.pi / 6, 3.0, math.pi - 1e-6])
def test_curvature_of_a_circle_is_its_step(step: float) -> None:
    angles = torch.arange(9, dtype=torch.float64) * step
    z = torch.stack([angles.cos(), angles.sin()], dim=-1) * 10

    # Coordinates near 10 carry errors of 1e-15, steps of 1e-5 therefore of 1e-10.
    assert float(curvature(z)) == pytest.approx(step, abs=1e-9)


def test_curvature_of_a_straight_line_is_zero_and_of_a_zigzag_pi() -> None:
    direction = random_rows(0, 1, 64)
    line = torch.arange(9, dtype=torch.float64).unsqueeze(-1) * direction
    zigzag = (torch.arange(9) % 2).double().unsqueeze(-1) * direction

    assert float(curvature(line)) == pytest.approx(0, abs=1e-7)
    assert float(curvature(zigzag)) == pytest.approx(math.pi, abs=1e-7)


def test_curvature_with_absolute_cosines_takes_turning_back_for_straight() -> None:
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # turns by 135 degrees
    zigzag = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])

    assert float(curvature(corner)) == pytest.approx(3 * math.pi / 4, abs=1e-15)
    assert float(curvature(corner, variant="difference-abs")) == pytest.approx(math.pi / 4)
    assert float(curvature(zigzag, variant="difference-abs")) == pytest.approx(0, abs=1e-15)


def test_token_angle_of_opposite_tokens_is_pi_and_of_a_circle_its_step() -> None:
    u = random_rows(3, 1, 8)
    angles = torch.arange(12, dtype=torch.float64) * (math.pi / 6)
    circle = torch.stack([angles.cos(), angles.sin()], dim=-1)

    opposite = curvature(torch.cat([u, -u, u, -u]), variant="token-angle")

    assert float(opposite) == pytest.approx(math.pi, abs=1e-9)
    # A whole turn has its mean at the centre, so that centring changes nothing.
    assert float(curvature(circle + 5, variant="token-angle")) == pytest.approx(math.pi / 6)


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


def test_angles_agree_with_the_cosine_distances_of_scikit_learn() -> None:
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    z = random_rows(8, 40, 12)
    steps, centred = z.diff(dim=0).numpy(), (z - z.mean(0)).numpy()

    def mean_angle(rows: np.ndarray) -> float:
        return float(np.arccos(1 - pairwise.paired_cosine_distances(rows[:-1], rows[1:])).mean())

    assert float(curvature(z)) == pytest.approx(mean_angle(steps), rel=1e-9)
    assert float(curvature(z, variant="token-angle")) == pytest.approx(
        mean_angle(centred), rel=1e-9
    )
    cosines = pairwise.cosine_similarity(z.numpy())
    expected = (cosines.sum() - 40) / (40 * 39)
    assert float(anisotropy(z)) == pytest.approx(expected, abs=1e-12)


def test_curvature_of_float32_unit_vectors_is_never_nan() -> None:
    u = torch.nn.functional.normalize(random_rows(5, 1, 300).float(), dim=-1)
    z = torch.arange(5.0).unsqueeze(-1) * u

    assert 0 <= float(curvature(z)) < 1e-3


def test_curvature_leaves_out_steps_of_length_zero() -> None:
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    paused = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 1.0]])
    halfway = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])

    assert float(curvature(paused)) == pytest.approx(float(curvature(corner)))
    assert float(curvature(halfway)) == 0
    assert float(curvature(torch.ones(5, 2))) == 0


def test_curvature_of_two_tokens_is_named() -> None:
    with pytest.raises(ValueError, match=r"at least 3 rows"):
        curvature(torch.eye(2))
    with pytest.raises(ValueError, match="a length is 2, of at least 3"):
        curvature(torch.zeros(2, 5, 3), torch.tensor([5, 2]))
    with pytest.raises(ValueError, match="a length is 1, of at least 2"):
        curvature(torch.zeros(2, 5, 3), torch.tensor([5, 1]), variant="token-angle")


def test_curvature_of_an_unknown_variant_is_named() -> None:
    with pytest.raises(ValueError, match="unknown variant 'angle'; known: difference, diff"):
        curvature(torch.eye(4), variant="angle")  # type: ignore[arg-type]


def test_masked_mean_ignores_padding() -> None:
    z = torch.tensor([[[1.0], [3.0], [100.0]]])

    assert masked_mean(z, torch.tensor([2])).tolist() == [[2.0]]


def test_metrics_package_names_every_metric_without_loading_torch() -> None:
    program = (
        "import sys, hpc_toolkit.science.metrics as m; "
        "print(len(m.METRICS), 'torch' in sys.modules)"
    )

    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert out.split() == [str(len(METRICS)), "False"]
