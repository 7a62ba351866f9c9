"""A made-up score surface over (model size, training step, layer), for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.bandit.arms import Arm, ArmTable
from hpc_toolkit.bandit.geometry import GEOMETRY_NAMES, geometry_features
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NOISE_STDERR = 0.002
"""Standard error of a score: about that of a mean over 32 text embedding tasks."""

RIPPLE = 0.004
"""Standard deviation of what a trained layer has of its own, at every step."""


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
    rng = np.random.default_rng([seed])
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
