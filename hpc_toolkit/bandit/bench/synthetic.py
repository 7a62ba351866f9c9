"""Synthetic scores over (model size, training step, layer), for tests and benchmarks."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.arms import GEOMETRY_NAMES, Arm, ArmTable, geometry_features
from hpc_toolkit.bandit.bench.replay import ScoreTable
from hpc_toolkit.bandit.policy import Floats, TaskSet
from hpc_toolkit.bandit.rule import Stream
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

NOISE_STDERR = 0.002
"""Standard error of a score: about that of a mean over 32 text embedding tasks."""

RIPPLE = 0.004
"""Standard deviation of each layer's own offset once trained, the same at every step."""

SIZES, BLOCKS = (70e6, 160e6, 410e6), (6, 12, 24)
"""Models of :func:`score_table`: parameters and blocks of three Pythia sizes."""

STEPS = (1, 128, 512, 2000, 8000, 32000, 143000)
"""Training steps of the checkpoints of :func:`score_table`."""

SECOND, OWN = 0.046, 0.047
"""Variance over arms that tasks do not share, as parts of the variance they share. In MTEB scores
of 175 layers of Pythia-410m on 32 tasks, the first component explains 91.5 % of the variance, the
second 4.2 %. The constants below come from the same scores.
"""

ROUGH = 0.0037
"""The part of ``OWN`` that varies from layer to layer without a pattern. For a trained checkpoint,
a task's score differs from neighbouring layers by 0.006, apart from what all tasks share. The rest
of ``OWN`` changes slowly with depth and training.
"""

LOADING = 0.47
"""Standard deviation over tasks of how much a task's score moves with the mean over tasks."""

TASK_SECONDS = 2_800.0
"""Sum of the tasks' durations in seconds at 0.57 of the largest model's blocks."""

TASK_SPREAD, TASK_FLOOR, ARM_SPREAD = 1.75, 2.8, 0.27
"""Durations: standard deviation of their logarithm over tasks, minimum seconds of a task, and
standard deviation of an arm's logarithm around its task's. As measured, the longest task then takes
a third of the sum, and the cheapest five together a hundredth."""


def surface(
    seed: int, sizes: Sequence[float], steps: Sequence[int], layers: Sequence[int]
) -> tuple[ArmTable, Floats]:
    """Generate scores shaped like the scores of language models probed layer by layer.

    Return one arm per (size, step, layer), with geometry features and (size, step) as the group,
    and the scores without noise, shape (n_arms,).

    Early in training the embeddings (layer 0) are best and scores fall with depth. Late in
    training the best layer is at 0.7 to 0.8 of the depth, a few hundredths above the last layer
    (Skean et al. 2025, arXiv 2502.02013). ``layers[i]`` is the number of blocks of ``sizes[i]``,
    which gives ``layers[i] + 1`` arms per step. Larger models score higher. Nothing else about the
    numbers is realistic.
    """
    rng = np.random.default_rng([seed, Stream.SURFACE])
    peak, gain = rng.uniform(0.70, 0.80), rng.uniform(0.065, 0.080)
    arms: list[Arm] = []
    scores: list[Floats] = []
    for size, blocks in zip(sizes, layers, strict=True):
        shortfall = 0.03 * float(np.log10(max(sizes) / size))
        ripple = rng.normal(0.0, RIPPLE, blocks + 1)
        for step in steps:
            group = f"{size:g}/step{step}"
            scores.append(_scores_of(step, blocks, peak, gain, ripple) - shortfall)
            for layer in range(blocks + 1):
                features = geometry_features(size=size, step=step, layer=layer, layers=blocks)
                arms.append(Arm(f"{group}/layer{layer}", group, features))
    return ArmTable(tuple(arms), GEOMETRY_NAMES), np.concatenate(scores)


def score_table(seed: int, tasks: int = 32) -> ScoreTable:
    """Generate synthetic scores and durations of three models on evaluation tasks: 315 arms.

    The mean over tasks is a :func:`surface` plus noise. Each task follows it with its own loading,
    a second component that depends on depth, and slow bends, which cancel over the tasks, plus
    noise. Standard errors are larger than that noise, because sources of error such as the choice
    of texts are common to all arms. The constants above calibrate the table; models of another
    size, width or kind have other numbers. Durations grow with the blocks that an arm passes: the
    last layer of the largest model takes 4.3 times as long as its embeddings.
    Raises ConfigError for fewer than 2 tasks.
    """
    if tasks < 2:
        raise ConfigError(f"{tasks} tasks", hint="give at least 2, so that they can differ")
    arms, means = surface(seed, SIZES, STEPS, BLOCKS)
    rng = np.random.default_rng([seed, Stream.MADE_TASKS])
    shared = means - means.mean()
    _, step, depth = arms.features.T
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
        arms=arms,
        tasks=TaskSet(tuple(f"task{number:02d}" for number in range(1, tasks + 1))),
        scores=scores,
        seconds=_seconds(rng, arms, tasks),
        stderrs=np.full_like(scores, NOISE_STDERR * np.sqrt(tasks)),
    )


def _cancelling(rng: np.random.Generator, shape: Floats, tasks: int, variance: float) -> Floats:
    """Return shape (n_arms, tasks): ``shape`` for every task, with task weights that sum to 0."""
    weights = rng.standard_normal(tasks)
    weights -= weights.mean()
    weights *= np.sqrt(variance) / weights.std()
    return np.outer((shape - shape.mean()) / shape.std(), weights)


def _seconds(rng: np.random.Generator, table: ArmTable, tasks: int) -> Floats:
    """Return shape (n_arms, tasks): durations in seconds on one GPU."""
    ranks = (np.arange(tasks) + 0.5) / tasks
    quantiles = np.array([NormalDist(0.0, TASK_SPREAD).inv_cdf(float(rank)) for rank in ranks])
    typical = rng.permutation(np.exp(quantiles))
    typical = TASK_FLOOR + typical * (TASK_SECONDS - tasks * TASK_FLOOR) / typical.sum()
    log_size, _, depth = table.features.T
    # The nearest: some versions of numpy give logarithms of arrays and of numbers that differ.
    nearest = np.abs(log_size[:, None] - np.log(SIZES)).argmin(axis=1)
    passed = depth * np.array(BLOCKS)[nearest] / max(BLOCKS)
    noise = np.exp(ARM_SPREAD * rng.standard_normal((len(passed), tasks)))
    return np.asarray(np.outer(0.35 + 1.15 * passed, typical) * noise)


def _scores_of(step: int, blocks: int, peak: float, gain: float, ripple: Floats) -> Floats:
    """Return shape (blocks + 1,): one checkpoint's scores by layer."""
    depth = np.arange(blocks + 1) / blocks
    early = 0.425 - 0.15 * -np.expm1(-depth / 0.08) - 0.03 * depth
    below = 1.0 - ((peak - depth) / peak) ** 2
    above = 1.0 - 0.6 * ((depth - peak) / (1.0 - peak)) ** 2
    hill = np.where(depth <= peak, below, above)
    late = 0.445 + gain * _ramp(step, middle=8.0, width=1.0) * hill + ripple
    trained = _ramp(step, middle=7.3, width=0.5)
    return np.asarray((1.0 - trained) * early + trained * late)


def _ramp(step: int, *, middle: float, width: float) -> float:
    """Rise from 0 to 1 over log(1 + step), with one half at ``middle``."""
    return float(1.0 / (1.0 + np.exp((middle - np.log1p(step)) / width)))
