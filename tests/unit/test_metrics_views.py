"""LiDAR, DiME and InfoNCE against known answers, identities, slow references and oracles."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import dime, infonce, lidar, matrix_entropy
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

Variant = Literal["simclr", "cpc"]
VARIANTS: tuple[Variant, ...] = ("simclr", "cpc")

sizes = st.tuples(st.integers(0, 10**6), st.integers(2, 10), st.integers(2, 10))


def views(seed: int, n: int, q: int, d: int) -> Any:
    """Inputs of several views each, in which an input's views are near each other."""
    inputs = slow.random_rows(seed, n, 1, d)
    return torch.from_numpy(inputs + 0.3 * slow.random_rows(seed + 1, n, q, d))


def two_views(seed: int, n: int, d: int) -> Any:
    return views(seed, n, 2, d).movedim(1, 0)


# LiDAR


@settings(max_examples=30)
@given(st.integers(0, 10**6), *(st.integers(2, 7),) * 2, st.integers(1, 12))
def test_lidar_agrees_with_outer_products_and_stays_in_bounds(
    seed: int, n: int, q: int, d: int
) -> None:
    z = views(seed, n, q, d)

    got = float(lidar(z))

    assert got == pytest.approx(slow.lidar(z.numpy(), 1e-4), rel=1e-6)
    assert 1 <= got <= min(n - 1, d)


@pytest.mark.parametrize("factor", [1e300, 1e150, 1e-150, 1e-300])
def test_lidar_at_the_ends_of_float64_is_that_without_delta_or_without_scatter(
    factor: float,
) -> None:
    z = views(1, 6, 4, 5)
    means = z.mean(1)
    between = matrix_entropy(means, center=True, unit_rows=False).exp()
    expected = lidar(z, delta=0.0) if factor > 1 else between

    assert float(lidar(z * factor)) == pytest.approx(float(expected), rel=1e-9)
    without = lidar(z * factor, delta=0.0)
    assert float(without) == pytest.approx(float(lidar(z, delta=0.0)), rel=1e-9)


def test_lidar_of_inputs_with_one_mean_is_zero() -> None:
    noise = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])

    assert float(lidar(noise.expand(5, 2, 2) + 3.0)) == 0.0
    assert float(lidar(torch.zeros(5, 2, 2))) == 0.0


@pytest.mark.parametrize(
    ("z", "options", "message"),
    [
        (
            torch.zeros(3, 4),
            {},
            r"at least 2 inputs with at least 2 views each, got shape \(3, 4\)",
        ),
        (torch.zeros(1, 4, 3), {}, "at least 2 inputs"),
        (torch.zeros(4, 1, 3), {}, "at least 2 views"),
        (torch.zeros(4, 4, 0), {}, "1 column"),
        (torch.rand(2, 2, 2), {"delta": -1.0}, r"delta is at least 0 and finite, got -1\.0"),
        (torch.rand(2, 2, 2), {"delta": math.inf}, "got inf"),
        (torch.rand(2, 2, 9), {"delta": 0.0}, r"singular beside delta = 0\.0; take a larger"),
        (torch.zeros(2, 2, 2), {"delta": 0.0}, "singular"),
    ],
)
def test_lidar_that_is_not_defined_is_named(z: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lidar(z, **options)


# DiME


@settings(max_examples=30)
@given(sizes, st.integers(0, 5), st.booleans())
def test_dime_agrees_with_the_slow_reference_and_stays_in_bounds(
    size: tuple[int, int, int], seed: int, center: bool
) -> None:
    n = size[1]
    a, b = two_views(*size)
    first, second = (rows - rows.mean(0) * center for rows in (a, b))
    draws = np.random.default_rng([seed])
    expected = slow.dime(first.numpy(), second.numpy(), [draws.permutation(n) for _ in range(3)])
    bound = min(float(matrix_entropy(one)) for one in (first, second))

    got = float(dime(a, b, permutations=3, seed=seed, center=center))

    assert got == pytest.approx(expected, abs=1e-9)
    assert -bound - 1e-12 <= got <= bound + 1e-12


def test_dime_of_a_seed_is_the_same_each_time_and_for_each_of_a_batch() -> None:
    pairs = [two_views(seed, 8, 4) for seed in range(3)]
    a, b = (torch.stack([one[view] for one in pairs]) for view in (0, 1))

    together = dime(a, b, seed=7)

    assert together.tolist() == pytest.approx([float(dime(x, y, seed=7)) for x, y in pairs])
    assert float(dime(a[0], b[0], seed=8)) != float(together[0])


@pytest.mark.parametrize("z", [torch.zeros(5, 3), torch.ones(5, 3), torch.ones(1, 3)])
def test_dime_of_rows_that_are_all_alike_is_zero(z: Any) -> None:
    assert float(dime(z, z)) == pytest.approx(0, abs=1e-12)
    assert float(dime(z, z, center=True)) == 0


@pytest.mark.parametrize(
    ("options", "b", "message"),
    [
        ({}, torch.zeros(4, 2), r"the same rows, got shapes \(3, 2\) and \(4, 2\)"),
        ({"permutations": 0}, torch.zeros(3, 2), "at least 1 permutation is needed, got 0"),
    ],
)
def test_dime_that_is_not_defined_is_named(options: Any, b: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dime(torch.ones(3, 2), b, **options)


# InfoNCE


@settings(max_examples=30)
@given(sizes, st.sampled_from(VARIANTS), st.floats(0.05, 5.0))
def test_infonce_agrees_with_the_slow_reference_and_stays_in_bounds(
    size: tuple[int, int, int], variant: Variant, temperature: float
) -> None:
    a, b = two_views(*size)
    negatives = 2 * size[1] - 2 if variant == "simclr" else size[1] - 1

    got = float(infonce(a, b, temperature=temperature, variant=variant))

    expected = slow.infonce(a.numpy(), b.numpy(), temperature, variant)
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert 0 <= got <= math.log1p(negatives * math.exp(2 / temperature))


@pytest.mark.parametrize("variant", VARIANTS)
def test_infonce_of_rows_without_a_direction_is_finite(variant: Variant) -> None:
    zero = torch.zeros(4, 3)

    candidates = 7 if variant == "simclr" else 4
    assert float(infonce(zero, zero, variant=variant)) == pytest.approx(math.log(candidates))
    assert float(infonce(zero + 1, zero + 1, variant=variant, center=True)) == pytest.approx(
        math.log(candidates)
    )


@pytest.mark.parametrize(
    ("options", "b", "message"),
    [
        ({}, torch.zeros(3, 4), r"the same shape, got \(3, 2\) and \(3, 4\)"),
        ({"variant": "clip"}, torch.zeros(3, 2), "unknown variant 'clip'; known: simclr, cpc"),
        ({"temperature": 0.0}, torch.zeros(3, 2), "a temperature is positive and finite"),
        ({"temperature": math.nan}, torch.zeros(3, 2), "got nan"),
    ],
)
def test_infonce_that_is_not_defined_is_named(options: Any, b: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infonce(torch.ones(3, 2), b, **options)
