"""Entropy, effective rank and RankMe against known answers, identities and a slow reference."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import effective_rank, matrix_entropy, rankme
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def random_rows(seed: int, n: int, d: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def rotation(seed: int, d: int) -> Any:
    return torch.from_numpy(slow.rotation(seed, d))


sizes = st.tuples(st.integers(0, 10**6), st.integers(2, 24), st.integers(2, 24))


def test_entropy_of_orthonormal_rows_is_log_n() -> None:
    assert float(matrix_entropy(torch.eye(8))) == pytest.approx(math.log(8), abs=1e-9)


def test_entropy_of_centred_identity_is_log_n_minus_one() -> None:
    assert float(matrix_entropy(torch.eye(8), center=True)) == pytest.approx(math.log(7), abs=1e-12)


def test_entropy_of_rows_on_one_line_is_zero() -> None:
    z = torch.outer(torch.arange(1.0, 9.0), torch.arange(1.0, 6.0))

    assert float(matrix_entropy(z, unit_rows=False)) == pytest.approx(0, abs=1e-9)


def test_entropy_of_one_direction_is_zero_and_not_negative_zero() -> None:
    entropy = float(matrix_entropy(torch.eye(1, 3).repeat(4, 1)))

    assert (entropy, math.copysign(1, entropy)) == (0.0, 1.0)


@settings(deadline=None, max_examples=50)
@given(sizes, st.booleans(), st.booleans())
def test_entropy_agrees_with_the_slow_reference(
    size: tuple[int, int, int], center: bool, unit_rows: bool
) -> None:
    z = random_rows(*size)
    expected = slow.entropy(z.numpy(), center=center, unit_rows=unit_rows)

    got = float(matrix_entropy(z, center=center, unit_rows=unit_rows))

    assert got == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=50)
@given(sizes, st.booleans())
def test_entropy_is_unchanged_by_rotation_and_row_scale(
    size: tuple[int, int, int], center: bool
) -> None:
    seed, n, d = size
    z = random_rows(seed, n, d)
    turned = z @ rotation(seed + 1, d)
    scaled = z * torch.linspace(0.1, 9.0, n, dtype=torch.float64).unsqueeze(-1)

    entropy = matrix_entropy(z, center=center)

    assert torch.allclose(matrix_entropy(turned, center=center), entropy, atol=1e-9)
    assert torch.allclose(matrix_entropy(scaled), matrix_entropy(z), atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(sizes)
def test_entropy_stays_within_its_bounds(size: tuple[int, int, int]) -> None:
    assert 0 <= float(matrix_entropy(random_rows(*size))) <= math.log(min(size[1:])) + 1e-9


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_entropy_of_padded_prompts_equals_each_prompt_alone(seed: int, lengths: list[int]) -> None:
    batch = random_rows(seed, len(lengths) * 12, 6).reshape(len(lengths), 12, 6)

    together = matrix_entropy(batch, torch.tensor(lengths), center=True, normalize="max")

    alone = [
        matrix_entropy(z[:n], center=True, normalize="max")
        for z, n in zip(batch, lengths, strict=True)
    ]
    assert torch.allclose(together, torch.stack(alone), atol=1e-9)


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
        (lambda: rankme(torch.full((2, 2), math.nan)), "holds NaN"),
        (lambda: effective_rank(torch.full((2, 2), math.inf)), "holds NaN or infinite"),
    ],
)
def test_unusable_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_ranks_of_orthonormal_rows_are_n() -> None:
    z = torch.eye(8, 20)

    assert float(effective_rank(z)) == pytest.approx(8)
    assert float(rankme(z)) == pytest.approx(8, rel=1e-5)
    assert float(effective_rank(z, center=True)) == pytest.approx(7)


@settings(deadline=None, max_examples=50)
@given(sizes, st.booleans())
def test_ranks_agree_with_the_slow_reference(size: tuple[int, int, int], center: bool) -> None:
    z = random_rows(*size)
    array = z.numpy() - z.numpy().mean(axis=0) * center

    assert float(effective_rank(z, center=center)) == pytest.approx(slow.rank(array, 0.0), rel=1e-9)
    assert float(rankme(z)) == pytest.approx(slow.rank(z.numpy(), 1e-7), rel=1e-9)


@settings(deadline=None, max_examples=50)
@given(sizes, st.floats(1e-6, 1e6))
def test_ranks_are_unchanged_by_scale_and_rotation_and_within_bounds(
    size: tuple[int, int, int], factor: float
) -> None:
    seed, n, d = size
    z = random_rows(seed, n, d)

    rank = float(effective_rank(z))

    assert float(effective_rank(z @ rotation(seed + 1, d) * factor)) == pytest.approx(rank)
    assert 1 <= rank <= min(n, d) * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(sizes, st.sampled_from([1e-7, 1e-3, 0.5]))
def test_rankme_exceeds_the_rank_by_its_eps_alone(size: tuple[int, int, int], eps: float) -> None:
    flat = rotation(size[0], min(size[1:]))
    k = len(flat)

    highest = (k / (1 + k * eps)) ** (1 + k * eps)

    assert float(rankme(flat, eps=eps)) == pytest.approx(highest, rel=1e-12)
    assert 1 - eps <= float(rankme(random_rows(*size), eps=eps)) <= highest * (1 + 1e-12)


def test_effective_rank_uses_plain_singular_values_not_their_squares() -> None:
    z = torch.diag(torch.tensor([2.0, 1.0]))

    expected = math.exp(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3))

    assert float(effective_rank(z)) == pytest.approx(expected)
    assert float(matrix_entropy(z, unit_rows=False).exp()) < expected - 0.1


def test_ranks_keep_small_singular_values_of_an_ill_conditioned_matrix() -> None:
    s = np.concatenate([np.ones(40), np.full(20, 1e-6)])
    z = rotation(1, 60) @ torch.diag(torch.from_numpy(s)) @ rotation(2, 60)

    p = s / s.sum()

    expected = math.exp(-(p * np.log(p)).sum())
    assert float(effective_rank(z)) == pytest.approx(expected, rel=1e-9)


def test_ranks_of_a_zero_matrix_are_zero() -> None:
    z = torch.zeros(4, 3)

    assert (float(effective_rank(z)), float(rankme(z))) == (0.0, 0.0)
