"""Every metric: known values, its range, and what is not defined."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_toolkit.science import metrics
from hpc_toolkit.science.metrics import (
    METRICS,
    STANDARD,
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


RANGES: dict[str, Callable[[int, int], tuple[float, float]]] = {
    "prompt_entropy": lambda n, d: (0.0, 1.0),
    "dataset_entropy": lambda n, d: (0.0, 1.0),
    "effective_rank": lambda n, d: (0.0, min(n, d)),
    "rankme": lambda n, d: (0.0, min(n, d) ** (1 + min(n, d) * 1e-7)),
    "anisotropy": lambda n, d: (-1.0, 1.0),
    "curvature": lambda n, d: (0.0, math.pi),
    "token_angle": lambda n, d: (0.0, math.pi),
    "alpha_req": lambda n, d: (0.0, math.inf),
    "lidar": lambda n, d: (0.0, min(n - 1, d)),
    "dime": lambda n, d: (-math.log(n), math.log(n)),
    "infonce": lambda n, d: (0.0, math.log1p((2 * n - 2) * math.exp(20))),
}
"""As the docstrings have them."""

KINDS: dict[str, Callable[[np.random.Generator, Any], Any]] = {
    "normal": lambda draws, z: z,
    "zero": lambda draws, z: z * 0,
    "constant": lambda draws, z: z * 0 + 1 / 3,
    "rank one": lambda draws, z: z[..., :1] * z[..., :1, :].mean(),
    "equal rows": lambda draws, z: z[..., draws.integers(0, 2, z.shape[-2]), :],
    "one row far away": lambda draws, z: z * np.append(1e9, np.ones(z.shape[-2] - 1))[:, None],
    "far from the origin": lambda draws, z: z + 1e6,
    "one feature is huge": lambda draws, z: z * np.append(1e8, np.ones(z.shape[-1] - 1)),
    "float16": lambda draws, z: z.astype(np.float16),
    "float32": lambda draws, z: z.astype(np.float32),
    "large": lambda draws, z: z * 1e200,
    "largest": lambda draws, z: np.clip(z, -1, 1) * 1.79e308,
    "small": lambda draws, z: z * 1e-200,
    "smallest": lambda draws, z: z * 1e-320,
}


def arguments(name: str, draws: np.random.Generator, kind: str) -> tuple[Any, int, int]:
    """What the function of a metric takes, with the number of rows and features."""
    n, d = (int(draws.choice([2, 3, 9, 20, 30])) for _ in range(2))
    shape = (2, n, d) if METRICS[name].scope == "views" else (n, d)
    made = KINDS[kind](draws, draws.normal(size=shape))
    return torch.from_numpy(np.ascontiguousarray(made)), n, d


def plain(name: str) -> Any:
    """What the function of a metric takes, of a size for which all are defined."""
    made = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 12, 9)))
    return made if METRICS[name].scope == "views" else made[0]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_in_its_range_or_says_why_there_is_none(name: str) -> None:
    defined = 0
    for seed, kind in zip(range(200), list(KINDS) * 15, strict=False):
        given, n, d = arguments(name, np.random.default_rng(seed), kind)
        try:
            value = METRICS[name].function(given)
        except ValueError as error:
            assert len(str(error).split()) > 4, error  # noqa: PT017 - either outcome is right
            continue
        low, high = RANGES[name](n, d)
        assert value.dtype == torch.float64
        assert low <= float(value) <= high, (seed, kind, n, d)
        assert math.copysign(1.0, float(value) or 0.0) >= 0 or low < 0, "-0.0"
        defined += 1
    assert defined >= (30 if name == "alpha_req" else 100)


@pytest.mark.parametrize("name", [name for name in METRICS if name != "lidar"])
def test_a_metric_is_unchanged_by_powers_of_two_near_the_ends_of_float64(name: str) -> None:
    given = plain(name)
    value = float(METRICS[name].function(given))

    for power in (-1000, -500, 500, 1000):
        halves = 2.0 ** (power // 2)
        assert float(METRICS[name].function(given * halves * halves)) == value


@pytest.mark.parametrize("name", [n for n in METRICS if METRICS[n].scope in ("prompt", "tokens")])
def test_padding_changes_nothing_even_if_it_is_no_number(name: str) -> None:
    made = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 9, 6)))
    lengths = torch.tensor([9, 3, 5])
    alone = [float(METRICS[name].function(z[:n])) for z, n in zip(made, lengths, strict=True)]

    for held in (1e300, math.nan, math.inf):
        padded = made.clone()
        for one, length in zip(padded, lengths, strict=True):
            one[length:] = held
        got = METRICS[name].function(padded, lengths)
        assert got.tolist() == pytest.approx(alone, abs=1e-12)
        assert metrics.masked_mean(padded, lengths)[1].tolist() == made[1, :3].mean(0).tolist()


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_leaves_its_input_alone_whatever_torch_tracks_of_it(name: str) -> None:
    given = plain(name)
    before = given.clone()
    with torch.inference_mode():
        inferred = given.clone()
    value = float(METRICS[name].function(given))

    assert float(METRICS[name].function(inferred)) == value
    found = METRICS[name].function(given.clone().requires_grad_())

    assert (float(found), found.requires_grad) == (value, False)
    assert torch.equal(before, given)
    assert torch.equal(before, inferred)


def test_standard_metrics_need_no_more_than_two_prompts_of_three_tokens() -> None:
    z = torch.from_numpy(np.random.default_rng(3).normal(size=(3, 4)))

    for name in STANDARD:
        rows = z if METRICS[name].scope != "dataset" else z[:2]
        assert math.isfinite(float(METRICS[name].function(rows)))


def test_every_function_of_the_package_is_registered_or_a_part_of_one() -> None:
    parts = {"METRICS", "STANDARD", "Metric", "masked_mean", "matrix_entropy"}

    assert set(metrics.__all__) - parts <= set(METRICS)
    assert set(STANDARD) < set(METRICS)
    assert set(RANGES) == set(METRICS)


@pytest.mark.parametrize("name", METRICS)
def test_numbers_that_are_not_finite_or_not_real_are_named(name: str) -> None:
    given, _, _ = arguments(name, np.random.default_rng(0), "normal")
    given.view(-1)[0] = math.nan

    with pytest.raises(ValueError, match="holds NaN or infinite values"):
        METRICS[name].function(given)
    with pytest.raises(ValueError, match=r"needs real numbers, got torch\.complex128"):
        METRICS[name].function(plain(name).to(torch.complex128))


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_another_type_is_that_of_the_same_numbers_in_float64(name: str) -> None:
    for kind in (torch.bfloat16, torch.float16, torch.uint8):
        given = (plain(name) * 16).abs().to(kind)

        got = METRICS[name].function(given)

        assert got.dtype == torch.float64
        assert float(got) == float(METRICS[name].function(given.double()))


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_of_a_batch_is_that_of_each_alone(name: str) -> None:
    draws = np.random.default_rng(4)
    shape = (3, 2, 12, 9) if METRICS[name].scope == "views" else (3, 12, 9)
    given = torch.from_numpy(draws.normal(size=shape))

    together = METRICS[name].function(given)

    alone = [float(METRICS[name].function(one)) for one in given]
    assert together.shape == (3,)
    assert together.tolist() == pytest.approx(alone, rel=1e-12)
    assert METRICS[name].function(given[:0]).shape == (0,)


@pytest.mark.parametrize("name", [name for name in METRICS if METRICS[name].fewest > 1])
def test_a_metric_is_defined_from_its_fewest_rows_on(name: str) -> None:
    fewest = METRICS[name].fewest
    draws = np.random.default_rng(5)

    def of(n: int) -> float:
        shape = (2, n, 30) if METRICS[name].scope == "views" else (n, 30)
        return float(METRICS[name].function(torch.from_numpy(draws.normal(size=shape))))

    assert math.isfinite(of(fewest))
    with pytest.raises(ValueError, match=r"at least|needs|equal"):
        of(fewest - 1)


@pytest.mark.cuda
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_on_a_gpu_is_that_on_the_cpu(name: str) -> None:
    shape = (4, 300, 200) if METRICS[name].scope == "views" else (300, 200)
    on_cpu = torch.from_numpy(np.random.default_rng(0).normal(size=shape))

    value = METRICS[name].function(on_cpu.cuda())

    assert value.is_cuda
    assert value.dtype == torch.float64
    assert float(value) == pytest.approx(float(METRICS[name].function(on_cpu)), rel=1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("name", [n for n in METRICS if METRICS[n].scope in ("prompt", "tokens")])
def test_lengths_may_be_on_the_cpu(name: str) -> None:
    z = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 9, 6)))
    lengths = torch.tensor([9, 3, 5])

    got = METRICS[name].function(z.cuda(), lengths)

    assert got.tolist() == pytest.approx(METRICS[name].function(z, lengths).tolist(), rel=1e-9)
