"""Metrics at the edge of their definition, each error named; known answers and others' code."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.science.metrics import (
    METRICS,
    alpha_req,
    anisotropy,
    curvature,
    dime,
    effective_rank,
    infonce,
    lidar,
    matrix_entropy,
    rankme,
)
from tests.unit import metric_references as slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def random_rows(seed: int, n: int, d: int) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)))


def test_anisotropy_leaves_zero_rows_out_and_ignores_row_lengths() -> None:
    z = random_rows(0, 5, 4)
    scaled = z * torch.linspace(0.01, 100, len(z), dtype=torch.float64).unsqueeze(-1)
    value = float(anisotropy(z))

    assert float(anisotropy(torch.cat([z, torch.zeros(3, 4)]))) == pytest.approx(value)
    assert float(anisotropy(scaled)) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("step", [1e-6, math.pi - 1e-6])
def test_curvature_of_a_circle_is_its_step_and_steps_of_length_zero_are_left_out(
    step: float,
) -> None:
    angles = torch.arange(9, dtype=torch.float64) * step
    z = torch.stack([angles.cos(), angles.sin()], dim=-1) * 10
    corner = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])

    # Coordinates near 10 carry errors of 1e-15, steps of 1e-5 therefore of 1e-10.
    assert float(curvature(z)) == pytest.approx(step, abs=1e-9)
    assert float(curvature(corner[[0, 1, 2, 2]])) == pytest.approx(float(curvature(corner)))
    assert float(curvature(corner[[0, 1, 1, 2]])) == 0
    assert float(curvature(torch.ones(5, 2))) == 0


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


def test_what_is_equal_or_at_the_mean_is_zero_and_not_noise() -> None:
    mean, step = random_rows(4, 2, 16)
    z = torch.stack([mean + step, mean - step, mean]) * 1e3
    noise = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])

    assert float(matrix_entropy(z, center=True)) == pytest.approx(0, abs=1e-12)
    assert float(matrix_entropy(z[:1].repeat(7, 1), center=True, normalize="max")) == 0
    assert (float(effective_rank(z * 0)), float(rankme(z * 0))) == (0.0, 0.0)
    assert float(lidar(noise.expand(5, 2, 2) + 3.0)) == 0.0
    assert float(dime(torch.ones(5, 3), torch.ones(5, 3), center=True)) == 0
    assert float(infonce(torch.zeros(4, 3), torch.zeros(4, 3))) == pytest.approx(math.log(7))


@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_lidar_at_the_ends_of_float64_is_that_without_delta_or_without_scatter(
    factor: float,
) -> None:
    z = torch.from_numpy(slow.random_rows(1, 6, 1, 5) + 0.3 * slow.random_rows(2, 6, 4, 5))
    between = matrix_entropy(z.mean(1), center=True, unit_rows=False).exp()
    expected = lidar(z, delta=0.0) if factor > 1 else between

    assert float(lidar(z * factor)) == pytest.approx(float(expected), rel=1e-9)


ONES, EYE = torch.ones(3, 2), torch.eye(20)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: matrix_entropy(EYE, normalize="maxx"), "unknown normalisation 'maxx'"),  # type: ignore[arg-type]
        (lambda: matrix_entropy(torch.zeros(0, 3)), r"got shape \(0, 3\)"),
        (lambda: alpha_req(torch.eye(8)), "needs 3 eigenvalues from number 6 on, got 2"),
        (lambda: lidar(torch.zeros(3, 4)), "at least 2 inputs with at least 2 views each"),
        (lambda: lidar(torch.zeros(4, 1, 3)), "at least 2 views"),
        (lambda: lidar(torch.rand(2, 2, 2), delta=math.inf), "delta is at least 0 .* got inf"),
        (lambda: lidar(torch.rand(2, 2, 9), delta=0.0), r"singular beside delta = 0\.0"),
        (lambda: dime(ONES, torch.zeros(4, 2)), r"got shapes \(3, 2\) and \(4, 2\)"),
        (lambda: dime(ONES, ONES, permutations=0), "at least 1 permutation is needed, got 0"),
        (lambda: infonce(ONES, torch.zeros(3, 4)), r"got \(3, 2\) and \(3, 4\)"),
        (lambda: infonce(ONES, ONES, temperature=math.nan), "a temperature .* got nan"),
    ],
)
def test_what_is_not_defined_is_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What gives a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


def test_every_known_answer_is_found(part: Any) -> None:
    answers = list(part("metricanswers").known_answers())

    assert len(answers) >= 17
    for metric, what, _, value, found in answers:
        assert found == pytest.approx(value, abs=1e-12), f"{metric}: {what}"


@pytest.mark.slow  # importing scikit-learn takes seconds
def test_metrics_agree_with_every_piece_of_independent_code(part: Any) -> None:
    rows = part("metricanswers").agreement_rows(2)

    code = {row[1] for row in rows}
    assert {"slow loops", "torch cross_entropy"} <= code
    assert {row[2] for row in rows} == {"1", "2"}
    assert max(float(row[3]) for row in rows) < 1e-11


def test_loops_of_every_metric_give_its_values(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = part("metrics_table")
    for name, size in {"LAYERS": 2, "TOKENS": 6, "VIEWS": 3}.items():
        monkeypatch.setattr(benchmark, name, size)

    seen = set()
    for name, ours, loops in benchmark.ways(prompts=25, features=12):
        seen.add(name)
        assert ours(1) == pytest.approx(loops(1), rel=1e-9, abs=1e-12), name

    assert seen == set(METRICS)
