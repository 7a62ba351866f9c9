"""Made-up scores over (model size, training step, layer), for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.bench.recorded import ScoreTable
from hpc_toolkit.bandit.draws import Stream
from hpc_toolkit.bandit.geometry import GEOMETRY_NAMES, geometry_features
from hpc_toolkit.bandit.pulls import TaskSet
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NOISE_STDERR = 0.002
"""Standard error of a score: about that of a mean over 32 text embedding tasks."""

RIPPLE = 0.004
"""Standard deviation of what a trained layer has of its own, at every step."""

SIZES, BLOCKS = (70e6, 160e6, 410e6), (6, 12, 24)
"""Models of :func:`score_table`: parameters and blocks of three Pythia sizes."""

STEPS = (1, 128, 512, 2000, 8000, 32000, 143000)
"""Training steps of its checkpoints."""

SECOND, OWN = 0.046, 0.047
"""Variance over arms that tasks do not share, as parts of the variance they share. In MTEB scores
of 175 layers of Pythia-410m on 32 tasks, the first component holds 91.5 % of it, the second 4.2 %.
"""

ROUGH = 0.0037
"""The part of ``OWN`` that differs from layer to layer without a pattern: of a trained checkpoint
a task's score departs from its neighbours by 0.006, beside what all tasks share. The rest bends
slowly with depth and training.
"""

LOADING = 0.47
"""Standard deviation over tasks of how much a task moves when their mean does, seen there."""

TASK_SECONDS = 2_800.0
"""Sum of the tasks' durations at 0.57 of the largest model's blocks, seen there."""

TASK_SPREAD, TASK_FLOOR, ARM_SPREAD = 1.75, 2.8, 0.27
"""Of the durations: standard deviation of their logarithm over tasks, seconds that each takes at
least, and standard deviation of the logarithm of one around its task's. So the longest task takes
a third of the sum, and the cheapest five a hundredth, as seen there."""


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Arms and the score that an evaluation of each would give."""

    table: ArmTable
    """One arm per (size, step, layer), with geometry features; a group is a (size, step)."""

    scores: NDArray[np.float64]
    """Shape (n_arms,): noise included, fixed per arm."""

    truth: NDArray[np.float64]
    """Shape (n_arms,): without noise."""

    stderr: float
    """Standard error of every score."""


def surface(
    seed: int, sizes: Sequence[float], steps: Sequence[int], layers: Sequence[int]
) -> Surface:
    """Scores shaped like those of language models probed layer by layer.

    Early in training the embeddings (layer 0) are best and scores fall with depth; late, the best
    layer lies at 0.7 to 0.8 of the depth, a few hundredths above the last (Skean et al. 2025,
    arXiv 2502.02013). ``layers[i]`` is the number of blocks of ``sizes[i]``, which gives
    ``layers[i] + 1`` arms per step. Larger models score higher. The numbers mean nothing else.
    Raises ConfigError for empty lists, unequal lengths, or values that geometry refuses.
    """
    if not sizes or not steps or len(sizes) != len(layers):
        message = f"{len(sizes)} sizes, {len(layers)} numbers of layers, {len(steps)} steps"
        raise ConfigError(message, hint="give one number of layers per size, and at least one step")
    rng = np.random.default_rng([seed, Stream.SURFACE])
    peak, gain = rng.uniform(0.70, 0.80), rng.uniform(0.065, 0.080)
    arms: list[Arm] = []
    truth: list[NDArray[np.float64]] = []
    for size, blocks in zip(sizes, layers, strict=True):
        shortfall = 0.03 * float(np.log10(max(sizes) / size))
        ripple = rng.normal(0.0, RIPPLE, blocks + 1)
        for step in steps:
            group = f"{size:g}/step{step}"
            truth.append(_scores_of(step, blocks, peak, gain, ripple) - shortfall)
            for layer in range(blocks + 1):
                features = geometry_features(size=size, step=step, layer=layer, layers=blocks)
                arms.append(Arm(f"{group}/layer{layer}", group, features))
    exact = np.concatenate(truth)
    noise = rng.normal(0.0, NOISE_STDERR, len(exact))
    return Surface(ArmTable(tuple(arms), GEOMETRY_NAMES), exact + noise, exact, NOISE_STDERR)


def score_table(seed: int, tasks: int = 32) -> ScoreTable:
    """Scores of three models on evaluation tasks, with durations: 315 arms, made up.

    The mean over tasks is a :func:`surface` and noise; each task follows it with a loading of its
    own, a second component that depends on depth, slow bends of its own, which cancel over the
    tasks, and noise. Standard errors are larger than that noise: what an error comes from, such as
    the texts that were drawn, is common to all arms. Calibrated
    by what the constants above say of real scores; a model of other size, width or kind has other
    numbers, and nothing here says so. Durations grow with the blocks that an arm passes: the last
    of the largest model takes 4.3 times as long as its embeddings.
    Raises ConfigError for fewer than 2 tasks.
    """
    if tasks < 2:
        message = f"{tasks} tasks"
        raise ConfigError(message, hint="give at least 2, so that they can differ")
    made = surface(seed, SIZES, STEPS, BLOCKS)
    rng = np.random.default_rng([seed, Stream.MADE_TASKS])
    shared = made.truth - made.truth.mean()
    _, step, depth = made.table.features.T
    step = step / step.max()
    second, *bends = (
        np.cos(np.pi * depth),
        *(np.cos(2 * np.pi * depth), np.sin(2 * np.pi * depth)),
        *(step * np.cos(np.pi * depth), step * np.sin(np.pi * depth)),
    )
    loadings = np.maximum(1.0 + LOADING * rng.standard_normal(tasks), 0.1)
    rough = np.exp(0.5 * rng.standard_normal(tasks))
    rough *= np.sqrt(ROUGH / np.mean(rough**2))
    parts = (
        np.outer(shared / shared.std(), loadings / loadings.mean()),
        _cancelling(rng, second, tasks, SECOND),
        *(_cancelling(rng, bend, tasks, (OWN - ROUGH) / len(bends)) for bend in bends),
        rough * rng.standard_normal((len(shared), tasks)),
    )
    scores = rng.uniform(0.2, 0.6, tasks) + shared.std() * np.sum(parts, axis=0)
    return ScoreTable(
        arms=made.table,
        tasks=TaskSet(tuple(f"task{number:02d}" for number in range(1, tasks + 1))),
        scores=scores,
        seconds=_seconds(rng, made.table, tasks),
        stderrs=np.full_like(scores, NOISE_STDERR * np.sqrt(tasks)),
    )


def _cancelling(
    rng: np.random.Generator, shape: NDArray[np.float64], tasks: int, variance: float
) -> NDArray[np.float64]:
    """Shape (n_arms, tasks): a shape over arms in every task, with weights that sum to 0."""
    weights = rng.standard_normal(tasks)
    weights -= weights.mean()
    weights *= np.sqrt(variance) / weights.std()
    return np.outer((shape - shape.mean()) / shape.std(), weights)


def _seconds(rng: np.random.Generator, table: ArmTable, tasks: int) -> NDArray[np.float64]:
    """Shape (n_arms, tasks): durations on one GPU."""
    ranks = (np.arange(tasks) + 0.5) / tasks
    quantiles = np.array([NormalDist(0.0, TASK_SPREAD).inv_cdf(float(rank)) for rank in ranks])
    typical = rng.permutation(np.exp(quantiles))
    typical = TASK_FLOOR + typical * (TASK_SECONDS - tasks * TASK_FLOOR) / typical.sum()
    log_size, _, depth = table.features.T
    blocks_of = dict(zip(np.log(SIZES), BLOCKS, strict=True))
    passed = depth * np.array([blocks_of[size] for size in log_size]) / max(BLOCKS)
    noise = np.exp(ARM_SPREAD * rng.standard_normal((len(passed), tasks)))
    return np.asarray(np.outer(0.35 + 1.15 * passed, typical) * noise)


def _scores_of(
    step: int, blocks: int, peak: float, gain: float, ripple: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Shape (blocks + 1,): one checkpoint's scores by layer."""
    depth = np.arange(blocks + 1) / blocks
    early = 0.425 - 0.15 * -np.expm1(-depth / 0.08) - 0.03 * depth
    below = 1.0 - ((peak - depth) / peak) ** 2
    above = 1.0 - 0.6 * ((depth - peak) / (1.0 - peak)) ** 2
    hill = np.where(depth <= peak, below, above)
    late = 0.445 + gain * _ramp(step, middle=8.0, width=1.0) * hill + ripple
    trained = _ramp(step, middle=7.3, width=0.5)
    return np.asarray((1.0 - trained) * early + trained * late)


def _ramp(step: int, *, middle: float, width: float) -> float:
    """From 0 to 1 over log(1 + step), one half at ``middle``."""
    return float(1.0 / (1.0 + np.exp((middle - np.log1p(step)) / width)))
