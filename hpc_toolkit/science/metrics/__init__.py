"""Representation metrics: tensors in, float64 numbers out, without any I/O.

Importing this package does not load torch; computing with it does. All functions take any real
dtype on any device, compute in float64 on that device, and treat leading dimensions as a batch. If
a value cannot be computed, they raise ValueError with the reason; no result is NaN or infinite.
Gradients do not flow through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.science.metrics.rows import anisotropy, curvature, masked_mean
from hpc_toolkit.science.metrics.spectrum import (
    alpha_req,
    dime,
    effective_rank,
    infonce,
    lidar,
    matrix_entropy,
    rankme,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "METRICS",
    "STANDARD",
    "Metric",
    "alpha_req",
    "anisotropy",
    "curvature",
    "dime",
    "effective_rank",
    "infonce",
    "lidar",
    "masked_mean",
    "matrix_entropy",
    "rankme",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric that gives one number for one layer."""

    scope: Literal["prompt", "tokens", "dataset", "views"]
    """The input of the function. ``prompt``: the tokens of each prompt; the values are then
    averaged over prompts. ``tokens``: the tokens of all prompts together. ``dataset``: one mean row
    per prompt. ``views``: one mean row for each of several augmentations of every prompt."""
    function: Callable[..., Tensor]
    """``(z, lengths)`` for ``prompt`` and ``tokens``, ``(z)`` for ``dataset``, ``(z)`` of shape
    ``(views, prompts, features)`` for ``views``."""
    about: str
    """One line with the definition, the chosen options and the range."""
    fewest: int = 1
    """Least number of rows: tokens of every prompt for ``prompt``, else different prompts."""


def _of_first_two(metric: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda z: metric(z[..., 0, :, :], z[..., 1, :, :], center=True)


_layer_entropy = partial(matrix_entropy, center=True, unit_rows=True, normalize="max")

METRICS: dict[str, Metric] = {
    "prompt_entropy": Metric(
        "prompt",
        _layer_entropy,
        "matrix-based entropy of a prompt's tokens (centred, unit rows) / log min(n, d): 0..1",
    ),
    "dataset_entropy": Metric(
        "dataset",
        _layer_entropy,
        "matrix-based entropy of the prompt means (centred, unit rows) / log min(n, d): 0..1",
    ),
    "effective_rank": Metric(
        "dataset",
        partial(effective_rank, center=True),
        "effective rank of the centred prompt means: 1..min(n, d)",
    ),
    "rankme": Metric("dataset", rankme, "RankMe of the uncentred prompt means: 1..min(n, d)"),
    "anisotropy": Metric(
        "tokens", anisotropy, "mean cosine between all tokens of all prompts: -1/(n - 1)..1"
    ),
    "curvature": Metric(
        "prompt",
        curvature,
        "mean angle between consecutive token differences, radians: 0..pi",
        fewest=3,
    ),
    "token_angle": Metric(
        "prompt",
        partial(curvature, variant="token-angle"),
        "mean angle between consecutive centred tokens, radians: 0..pi",
        fewest=2,
    ),
    "alpha_req": Metric(
        "dataset",
        alpha_req,
        "decay of the prompt means' covariance eigenvalues 6 to 100, log-log slope: 0 upwards",
        fewest=9,
    ),
    "lidar": Metric(
        "views",
        lambda z: lidar(z.movedim(-3, -2)),
        "LiDAR of the views' means, delta 1e-4, as a rank: 1..min(n - 1, d)",
        fewest=2,
    ),
    "dime": Metric(
        "views",
        _of_first_two(dime),
        "DiME of the first two views (centred, order 1): -log n..log n",
    ),
    "infonce": Metric(
        "views",
        _of_first_two(infonce),
        "SimCLR loss of the first two views (centred, temperature 0.1), low is good: 0 upwards",
        fewest=2,
    ),
}
"""Every metric, by its name in results and tables."""

STANDARD = (
    "prompt_entropy",
    "dataset_entropy",
    "effective_rank",
    "rankme",
    "anisotropy",
    "curvature",
)
"""The default metrics: one forward pass over the prompts is enough for all of them, and they are
defined for any two prompts."""
