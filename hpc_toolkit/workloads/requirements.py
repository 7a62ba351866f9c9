"""What the model workloads require of their options and items."""

from __future__ import annotations

from typing import Any

from hpc_toolkit.errors import ConfigError, PermanentError


def require_layer(item: dict[str, Any], layers: int, checkpoint: str) -> int:
    """The item's layer, an integer from 0 to ``layers - 1``.

    Raises:
        PermanentError: it is missing, or the checkpoint has no such layer.
    """
    layer = item.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        msg = f"{checkpoint}: no layer {layer!r}; it has layers 0 to {layers - 1}"
        raise PermanentError(msg)
    return layer


def require_positive(name: str, value: object) -> int:
    """An option that counts something.

    Raises:
        ConfigError: it is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{name}: {value!r} is not a positive integer"
        raise ConfigError(msg)
    return value
