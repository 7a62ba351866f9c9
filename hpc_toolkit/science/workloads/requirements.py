"""Checks of the options, items and models of the model workloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, PermanentError

if TYPE_CHECKING:
    from hpc_toolkit.science.workloads.checkpoints import LoadedModel


def require_layer(item: dict[str, Any], layers: int, checkpoint: str) -> int:
    """Return the item's layer, an integer from 0 to ``layers - 1``.

    Raises:
        PermanentError: the layer is missing, or the checkpoint has no such layer.
    """
    layer = item.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        msg = f"{checkpoint}: no layer {layer!r}; it has layers 0 to {layers - 1}"
        raise PermanentError(msg)
    return layer


def require_one_stack(loaded: LoadedModel) -> None:
    """Require a model with one stack of layers: an encoder or a decoder.

    Raises:
        PermanentError: the model has an encoder and a decoder, whose layers have no single order.
    """
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        kind = type(loaded.model).__name__
        msg = f"{loaded.name}: {kind} is an encoder with a decoder, so 'layer 3' could be of either"
        raise PermanentError(msg, hint="take a model that is one of the two")


def require_positions(loaded: LoadedModel, longest: int) -> None:
    """Require a model that takes texts of ``longest`` tokens.

    A text that is too long raises a shape error on a CPU, and ends the process on a GPU. A model
    with rotary positions would go on, with positions for which it was never trained.

    Raises:
        PermanentError: the model has fewer positions.
    """
    positions = _positions(loaded.model)
    if positions is not None and longest > positions:
        msg = f"{loaded.name}: it takes {positions} tokens, and the longest text has {longest}"
        raise PermanentError(msg, hint=f"set max_tokens to {positions} or less, for all models")


def _positions(model: Any) -> int | None:
    """Return the number of tokens of the longest text that a model takes; None if unknown."""
    from torch.nn import Embedding

    size: object = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(size, int) or size < 1:
        return None
    words = model.get_input_embeddings()
    for module in model.modules():
        if not isinstance(module, Embedding) or module is words:
            continue
        if module.num_embeddings == size and module.padding_idx is not None:
            return size - module.padding_idx - 1  # RoBERTa counts positions after the padding index
    return size


def require_positive(name: str, value: object) -> int:
    """Require an option to be a count.

    Raises:
        ConfigError: the value is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        msg = f"{name}: {value!r} is not a positive integer"
        raise ConfigError(msg)
    return value
