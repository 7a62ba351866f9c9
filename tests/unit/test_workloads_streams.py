"""Rows that come in parts, and the few that stand for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hpc_toolkit.science.metrics import METRICS, effective_rank, rankme
from hpc_toolkit.science.workloads.measuring import CENTRED, SINGULAR, RowStream

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def rows(n: int, d: int, *, decay: float = 2, offset: float = 3, seed: int = 0) -> Tensor:
    """Rows whose columns shrink to 10^-decay of the first, around a mean that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(n, d, generator=generator, dtype=torch.float64)
    scales = torch.logspace(0, -decay, d, dtype=torch.float64)
    shift: Tensor = torch.randn(d, generator=generator, dtype=torch.float64)
    scaled: Tensor = draw * scales + offset * shift
    return scaled


def streamed(z: Tensor, part: int, *, whole: bool = False, centred: bool = False) -> Tensor:
    stream = RowStream(whole=whole)
    for start in range(0, len(z), part):
        stream.add(z[start : start + part])
    return stream.rows(centred=centred)


@pytest.mark.parametrize(
    ("n", "d", "part"), [(300, 12, 7), (301, 12, 301), (64, 1, 3), (90, 40, 4)]
)
def test_singular_values_are_those_of_all_rows_centred_or_not(n: int, d: int, part: int) -> None:
    z = rows(n, d)

    few = streamed(z, part)

    assert few.shape == (d + 1, d)
    for center in (False, True):
        expected, got = (
            torch.linalg.svdvals(one - one.mean(0) * center).numpy() for one in (z, few)
        )
        assert got[:d] == pytest.approx(expected, rel=0, abs=1e-13 * expected[0] + 1e-14)


def test_small_singular_values_keep_their_digits() -> None:
    z = rows(500, 20, decay=9, offset=0)

    got = torch.linalg.svdvals(streamed(z, 16)).numpy()

    # The root of the eigenvalues of the sum of squares is wrong by half here.
    assert got == pytest.approx(torch.linalg.svdvals(z).numpy(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(SINGULAR & set(METRICS)))
def test_metrics_of_singular_values_have_the_value_of_all_rows(name: str) -> None:
    z = rows(400, 30)

    few = streamed(z, 16)

    assert len(few) == 31
    assert float(METRICS[name].function(few)) == pytest.approx(
        float(METRICS[name].function(z)), rel=1e-10
    )


def test_the_order_of_the_rows_and_their_parts_change_nothing_that_counts() -> None:
    z = rows(200, 10)

    values = [
        float(effective_rank(streamed(one, part), center=True))
        for one in (z, z.flip(0))
        for part in (1, 9, 50)
    ]

    assert values == pytest.approx([values[0]] * 6, rel=1e-12)


@pytest.mark.parametrize(("n", "whole"), [(26, False), (200, True)])
def test_few_rows_and_rows_that_are_wanted_whole_are_returned_as_they_came(
    n: int, whole: bool
) -> None:
    z = rows(n, 12)

    assert torch.equal(streamed(z, 5, whole=whole), z)


def test_what_is_kept_does_not_grow_with_the_rows() -> None:
    stream = RowStream(whole=False)

    for seed in range(40):
        stream.add(rows(10, 8, seed=seed))
        assert sum(len(part) for part in stream._parts) <= 2 * 9


def test_rows_that_are_all_equal_have_no_spread() -> None:
    few = streamed(torch.ones(100, 6), 8)

    assert float(effective_rank(few, center=True)) == 0
    assert float(rankme(few)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("name", sorted(CENTRED))
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e7])
def test_metrics_that_centre_have_the_value_of_all_rows_however_far_away(
    name: str, offset: float
) -> None:
    z = rows(2000, 16, decay=6, offset=0) + offset

    few = streamed(z, 37, centred=True)

    about = z - z.mean(0)  # all digits that the rows have
    assert few.shape == (17, 16)
    assert float(METRICS[name].function(few)) == pytest.approx(
        float(METRICS[name].function(about)), rel=1e-5 if offset == 1e7 else 1e-10
    )
