"""Representation metrics: tensors in, float64 numbers out, no input or output of their own.

Importing this package loads no torch; computing with it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from hpc_toolkit.metrics.geometry import anisotropy, curvature
from hpc_toolkit.metrics.rows import masked_mean
from hpc_toolkit.metrics.spectrum import effective_rank, matrix_entropy, rankme

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "METRICS",
    "Metric",
    "anisotropy",
    "curvature",
    "effective_rank",
    "masked_mean",
    "matrix_entropy",
    "rankme",
]


@dataclass(frozen=True, slots=True)
class Metric:
    """One number for one layer, by name."""

    scope: Literal["prompt", "tokens", "dataset"]
    """What the function sees. ``prompt``: the tokens of each prompt, values then averaged over
    prompts. ``tokens``: the tokens of all prompts together. ``dataset``: one mean row a prompt."""

    function: Callable[..., Tensor]
    """``(z, lengths)`` for ``prompt`` and ``tokens``, ``(z)`` for ``dataset``."""

    about: str
    """One line with the definition, the options chosen and the range."""


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
        "tokens", anisotropy, "mean cosine between all tokens of all prompts: -1..1"
    ),
    "curvature": Metric(
        "prompt", curvature, "mean angle between consecutive token differences, radians: 0..pi"
    ),
}
"""The metrics of the metrics stage, by the name they have in results and tables."""
