"""TwoNN against known dimensions, identities, a slow reference, scikit-dimension, scikit-learn."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_toolkit.science.metrics import geometry, two_nn
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

Method = Literal["mle", "linear"]
METHODS: tuple[Method, ...] = ("mle", "linear")


def flat(dimension: int, n: int, d: int) -> Any:
    """Points spread evenly over a cube of a dimension, turned into a wider space."""
    cube = np.random.default_rng(dimension).random((n, dimension))
    return torch.from_numpy(cube @ slow.rotation(1, d)[:dimension])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dimension", "low", "high"), [(1, 0.9, 1.1), (2, 1.8, 2.2), (5, 4.3, 5.3)]
)
def test_two_nn_of_a_flat_cube_is_near_its_dimension(
    method: Method, dimension: int, low: float, high: float
) -> None:
    assert low < float(two_nn(flat(dimension, 2000, 50), method=method)) < high


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


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.floats(-250, 250), st.sampled_from(METHODS))
def test_two_nn_is_unchanged_by_scale_rotation_translation_and_order(
    seed: int, exponent: float, method: Method
) -> None:
    z = slow.random_rows(seed, 25, 4)
    order = np.random.default_rng(seed).permutation(25)
    moved = (z[order] @ slow.rotation(seed, 4) + 2.0) * 10.0**exponent

    expected = float(two_nn(torch.from_numpy(z), method=method))

    assert float(two_nn(torch.from_numpy(moved), method=method)) == pytest.approx(
        expected, rel=1e-9
    )


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


def test_two_nn_in_parts_is_that_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    z = torch.from_numpy(slow.random_rows(4, 50, 6))
    z[20:40] = z[:20] * (1 + 1e-9)  # computed twice, and found in several parts
    whole = float(two_nn(z))

    monkeypatch.setattr(geometry, "_CHUNK", 7 * 50)

    assert float(two_nn(z)) == whole


def test_two_nn_of_a_batch_is_that_of_each_matrix() -> None:
    z = torch.from_numpy(slow.random_rows(5, 4, 20, 3)).reshape(2, 2, 20, 3)
    z[0, 1, 10:] = z[0, 1, :10]  # fewer different rows than the others

    assert two_nn(z).tolist() == [[float(two_nn(one)) for one in row] for row in z]


@pytest.mark.slow  # importing it takes seconds
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("d", [3, 40])
def test_two_nn_agrees_with_scikit_dimension(method: Method, d: int) -> None:
    skdim = pytest.importorskip("skdim")
    z = slow.random_rows(6, 300, d)

    for discard in (0.1, 0.25):
        oracle = skdim.id.TwoNN(discard_fraction=discard, method=method).fit(z)
        got = float(two_nn(torch.from_numpy(z), method=method, discard=discard))
        assert got == pytest.approx(oracle.dimension_, rel=1e-9)


def test_distances_agree_with_the_neighbours_of_scikit_learn() -> None:
    sklearn = pytest.importorskip("sklearn.neighbors")
    z = slow.random_rows(7, 200, 10)

    oracle, _ = sklearn.NearestNeighbors(n_neighbors=3, algorithm="kd_tree").fit(z).kneighbors(z)

    got = geometry._two_smallest(torch.from_numpy(z))
    assert got.numpy() == pytest.approx(oracle[:, 1:], rel=1e-12)


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
        (torch.full((5, 5), torch.nan), {}, "holds NaN"),
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
