"""Features of a (checkpoint, layer) arm that need no measuring: model size, step and depth."""

from __future__ import annotations

import math

from hpc_toolkit.errors import ConfigError

GEOMETRY_NAMES = ("log_size", "log1p_step", "relative_depth")
"""The names of the values of ``geometry_features``, in the same order."""


def geometry_features(
    *, size: float, step: int, layer: int, layers: int
) -> tuple[float, float, float]:
    """Return log(size), log(1 + step) and layer / layers.

    ``size`` is either the number of parameters or the model's width; use the same for all arms.
    ``layer`` runs from 0, the embeddings, to ``layers``, the output of the last block.
    Raises ConfigError for a value outside its range.
    """
    if not (math.isfinite(size) and size > 0):
        message = f"size is {size!r}"
        raise ConfigError(message, hint="a model's size is a positive number")
    if not (math.isfinite(step) and step >= 0):
        message = f"step is {step!r}"
        raise ConfigError(message, hint="a training step is 0 or more")
    if layers < 1 or not 0 <= layer <= layers:
        message = f"layer {layer!r} of {layers!r} layers"
        raise ConfigError(message, hint="layers run from 0 (embeddings) to the number of blocks")
    return math.log(size), math.log1p(step), layer / layers
