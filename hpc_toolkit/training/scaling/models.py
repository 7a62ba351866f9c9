"""The models that a scaling run trains, with random weights so that none are downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.installation import how_to_add

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hpc_toolkit.training.scaling.settings import Settings

VOCABULARY = 512

_HEAD = 32


def make_model(settings: Settings, device: torch.device) -> tuple[nn.Module, int]:
    """Return the model on its device, and the size of its vocabulary.

    Raises ConfigError if the model cannot be made, or a package that it needs is missing.
    """
    shape = settings.decoder()
    if shape is None:
        model, vocabulary = _of_transformers(settings.model)
    else:
        model, vocabulary = _decoder(*shape, settings.seq_length), VOCABULARY
    if settings.lora_rank:
        _add_adapters(model, settings.lora_rank)
    return model.to(device), vocabulary


def logits_of(output: Any) -> torch.Tensor:
    """Return the scores of the next token, from our decoder or a model of transformers."""
    scores: torch.Tensor = output.logits if hasattr(output, "logits") else output
    return scores


def _decoder(layers: int, width: int, length: int) -> nn.Module:
    """Return a decoder in plain torch, since importing transformers takes seconds."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1 = nn.LayerNorm(width)
            self.norm_2 = nn.LayerNorm(width)
            self.attention_in = nn.Linear(width, 3 * width)
            self.attention_out = nn.Linear(width, width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            batch, tokens, _ = states.shape
            parts = self.attention_in(self.norm_1(states)).chunk(3, dim=-1)
            query, key, value = (
                part.view(batch, tokens, width // _HEAD, _HEAD).transpose(1, 2) for part in parts
            )
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            states = states + self.attention_out(seen.transpose(1, 2).reshape(batch, tokens, width))
            inner = nn.functional.gelu(self.up(self.norm_2(states)))
            summed: torch.Tensor = states + self.down(inner)
            return summed

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, width)
            self.places = nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            places = torch.arange(ids.shape[1], device=ids.device)
            states = self.tokens(ids) + self.places(places)
            for block in self.blocks:
                states = block(states)
            scores: torch.Tensor = self.head(self.norm(states))
            return scores

    return Decoder()


def _of_transformers(name: str) -> tuple[nn.Module, int]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        message = f"--model: {name!r} needs transformers, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="torch")) from error
    try:
        config = AutoConfig.from_pretrained(name)
        # The cache keeps keys and values for generating tokens, which a training does not do.
        config.use_cache = False
        return AutoModelForCausalLM.from_config(config), int(config.vocab_size)
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        message = f"--model: {name!r} is not a causal language model: {lines[0]}"
        hint = "decoder-4x128, a directory with a config.json, or a name on the hub"
        raise ConfigError(message, hint=hint) from error


def _add_adapters(model: nn.Module, rank: int) -> None:
    """Train only adapters of this rank, on all linear layers except the output layer."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        message = "--lora-rank needs peft, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="scaling")) from error
    # Models of transformers return their output layer; our decoder names it ``head``.
    ask = getattr(model, "get_output_embeddings", lambda: model.get_submodule("head"))
    scores = ask()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and module is not scores
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
