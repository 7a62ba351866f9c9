"""A small decoder of torch's own modules, for where importing transformers takes too long."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class Output(NamedTuple):
    """What a pass gives, named as in transformers."""

    loss: torch.Tensor
    """Mean cross entropy of the next token, in nats."""
    logits: torch.Tensor
    """Scores of each token of the vocabulary, ``(batch, length, vocabulary)``."""


class PlainDecoder(nn.Module):
    """Token and position embeddings, pre-norm blocks with causal attention, and a linear head."""

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 64,
        blocks: int = 2,
        heads: int = 4,
        longest: int = 256,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Output:
        """Scores of ``input_ids`` ``(batch, length)``, and their loss against ``labels``."""
        length = input_ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=input_ids.device)
        states = self.tokens(input_ids) + self.positions.weight[:length]
        for block in self.blocks:
            states = block(states, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(states))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)
