"""Hidden states of every layer from one forward pass, and mean-pooled embeddings made of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from torch import Tensor

    from hpc_toolkit.workloads.checkpoints import LoadedModel

CACHE_BYTES = 2**30
"""Embeddings that a context keeps: the text sets used last, up to this size."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The hidden states of a few texts, at every layer."""

    rows: list[int]
    """Positions of the texts in the list that was given, longest texts last."""

    states: tuple[Tensor, ...]
    """One float32 ``(b, t, d)`` a layer, ``L + 1`` of them: embeddings first, then each block's
    output. As transformers returns them: the last, and only it, is after the final norm."""

    lengths: Tensor
    """Tokens of each text ``(b,)``; states beyond are padding."""

    def halves(self) -> list[Batch]:
        """The same states in two batches, or in this one if it holds one text; copies nothing."""
        middle = len(self.rows) // 2
        if middle == 0:
            return [self]
        return [
            Batch(self.rows[part], tuple(state[part] for state in self.states), self.lengths[part])
            for part in (slice(None, middle), slice(middle, None))
        ]


def layer_count(loaded: LoadedModel) -> int:
    """Number of hidden states: the blocks and the embeddings (layer 0)."""
    return int(loaded.model.config.num_hidden_layers) + 1


def tokenize(loaded: LoadedModel, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each text, cut to ``max_tokens``.

    Raises:
        PermanentError: where a text has no token at all.
    """
    encoded = loaded.tokenizer(list(texts), truncation=True, max_length=max_tokens)
    ids: list[list[int]] = encoded["input_ids"]
    for row, tokens in enumerate(ids):
        if not tokens:
            msg = f"{loaded.name}: text {row + 1} has no tokens: {texts[row][:40]!r}"
            raise PermanentError(msg)
    return ids


def forward(loaded: LoadedModel, ids: Sequence[list[int]], batch_size: int) -> Iterator[Batch]:
    """Run the model once over all texts, in batches of similar length.

    Padding is on the right, where a causal model cannot see it and positions stay those of the
    text alone. Batches depend on the texts only, so two passes give the same numbers.

    Raises:
        PermanentError: for token ids beyond the vocabulary, or hidden states that are not finite.
    """
    import torch

    _require_vocabulary(loaded, ids)
    order = sorted(range(len(ids)), key=lambda row: len(ids[row]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        lengths = torch.tensor([len(ids[row]) for row in rows])
        width = int(lengths.max())
        padded = torch.tensor([ids[row] + [0] * (width - len(ids[row])) for row in rows])
        mask = (torch.arange(width) < lengths.unsqueeze(1)).long()
        with torch.inference_mode():
            output = loaded.model(
                input_ids=padded.to(loaded.device),
                attention_mask=mask.to(loaded.device),
                output_hidden_states=True,
                use_cache=False,
            )
        _require_finite(loaded, output.hidden_states)
        yield Batch(rows, output.hidden_states, lengths.to(loaded.device))


class LayerEmbeddings:
    """Mean-pooled embeddings of named text sets, all layers of a set from one forward pass."""

    def __init__(self, loaded: LoadedModel, *, max_tokens: int, batch_size: int) -> None:
        self.loaded = loaded
        self.layers = layer_count(loaded)
        self.forwards = 0
        """Passes over a text set so far."""
        self._max_tokens = max_tokens
        self._batch_size = batch_size
        self._kept: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, name: str, texts: Sequence[str], layer: int) -> np.ndarray:
        """Float32 ``(len(texts), d)``; ``name`` stands for ``texts`` and is computed once.

        The sets used last are kept up to `CACHE_BYTES`, and always the one in use.
        """
        if name not in self._kept:
            self._kept[name] = self._embed(texts)
            while len(self._kept) > 1 and self._size() > CACHE_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        found: np.ndarray = self._kept[name][layer]
        return found

    def halve(self) -> bool:
        """Run smaller batches from now on; False where they hold one text already."""
        if self._batch_size == 1:
            return False
        self._batch_size //= 2
        return True

    def _size(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())

    def _embed(self, texts: Sequence[str]) -> np.ndarray:
        import numpy as np

        ids = tokenize(self.loaded, texts, self._max_tokens)
        width = int(self.loaded.model.config.hidden_size)
        pooled = np.zeros((self.layers, len(texts), width), dtype=np.float32)
        self.forwards += 1
        for batch in forward(self.loaded, ids, self._batch_size):
            for layer, states in enumerate(batch.states):
                pooled[layer, batch.rows] = mean_pool(states, batch.lengths).cpu().numpy()
        return pooled


def mean_pool(states: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the real tokens of ``(b, t, d)``, in the dtype of the states: ``(b, d)``."""
    import torch

    mask = torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(1)
    return (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1)


def _require_vocabulary(loaded: LoadedModel, ids: Sequence[list[int]]) -> None:
    size = int(loaded.model.config.vocab_size)
    largest = max((max(tokens) for tokens in ids), default=0)
    if largest >= size:
        msg = f"{loaded.name}: the tokenizer gives id {largest}, but the model knows {size} tokens"
        raise PermanentError(msg, hint="model and tokenizer do not belong together")


def _require_finite(loaded: LoadedModel, states: Sequence[Tensor]) -> None:
    for layer, state in enumerate(states):
        if not bool(state.isfinite().all()):
            msg = f"{loaded.name}: hidden states of layer {layer} hold NaN or infinite values"
            raise PermanentError(msg, hint="the weights are damaged, or training diverged")
