"""Tiny models with random weights, one of each kind of architecture, in full or cut off."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_toolkit.science.workloads.checkpoints import LoadedModel

BLOCKS = 3
WIDTH = 16
VOCABULARY = 60

_USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_neox": _USUAL,
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": BLOCKS,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "llama": {**_USUAL, "num_key_value_heads": 1},
    "bert": _USUAL,
    "opt": {**_USUAL, "ffn_dim": 32, "word_embed_proj_dim": WIDTH},
    "distilbert": {
        "vocab_size": VOCABULARY,
        "dim": WIDTH,
        "n_layers": BLOCKS,
        "n_heads": 2,
        "hidden_dim": 32,
        "pad_token_id": 0,
    },
    "albert": {**_USUAL, "embedding_size": 8},
    "clip_text_model": _USUAL,
}
"""Keyword arguments of a configuration, by ``model_type``."""

TEXTS = [[5, 9, 14], [7], [3, 3, 8, 21, 40, 2, 11], [30, 1, 12, 50], [2, 59]]
"""Token ids of a few texts."""


def tiny(kind: str, blocks: int = BLOCKS, **more: Any) -> LoadedModel:
    """Return a model of ``kind`` whose norms are not the identity, like those of trained models."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, **{**SETTINGS[kind], **more})
    config.num_hidden_layers = blocks
    model = _built(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.ndim == 1 else 0.05))
    return _loaded(model, kind)


def cut(loaded: LoadedModel, blocks: int) -> LoadedModel:
    """Return the model cut off after its first ``blocks`` blocks, with the same weights."""
    config = copy.deepcopy(loaded.model.config)
    config.num_hidden_layers = blocks
    shorter = _built(config)
    shorter.load_state_dict(loaded.model.state_dict(), strict=False)
    return _loaded(shorter, loaded.name)


def alone(loaded: LoadedModel, ids: Sequence[int]) -> Tensor:
    """Return the model's output for one text in a batch of its own: ``(tokens, width)``."""
    import torch

    with torch.inference_mode():
        returned: Tensor = loaded.model(input_ids=torch.tensor([list(ids)])).last_hidden_state
    return returned[0]


def _built(config: Any) -> torch.nn.Module:
    from transformers import AutoModel

    return AutoModel.from_config(config).eval()  # type: ignore[no-any-return]


def _loaded(model: torch.nn.Module, name: str) -> LoadedModel:
    import torch

    from hpc_toolkit.science.workloads.checkpoints import LoadedModel

    return LoadedModel(model, None, torch.device("cpu"), name)
