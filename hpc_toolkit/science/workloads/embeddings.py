"""Mean-pooled embeddings of texts; one forward pass gives all layers of a text set."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hpc_toolkit.science.workloads.onepass import (
    Batch,
    BatchSize,
    Distinct,
    forward,
    layer_count,
    tokenize,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from torch import Tensor

    from hpc_toolkit.science.workloads.checkpoints import LoadedModel
    from hpc_toolkit.science.workloads.onepass import FinalNorm

CACHE_BYTES = 2**30
"""Embeddings that a context keeps in memory: the most recently used text sets, up to this size."""


class LayerEmbeddings:
    """Mean-pooled embeddings of named text sets; one forward pass gives all layers of a set."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_tokens: int,
        batch_size: int,
        max_batch_tokens: int | None = None,
        final_norm: FinalNorm = "raw",
    ) -> None:
        self.loaded = loaded
        self.layers = layer_count(loaded)
        self.forwards = 0
        """Number of forward passes over a text set so far."""
        self._max_tokens = max_tokens
        self._batch = BatchSize(batch_size, max_batch_tokens)
        self._final_norm = final_norm
        self._kept: OrderedDict[str, list[np.ndarray]] = OrderedDict()

    def of(self, name: str, texts: Sequence[str], layer: int) -> np.ndarray:
        """Return float32 ``(len(texts), d)``; ``name`` identifies ``texts`` in the cache.

        The cache keeps the most recently used sets up to `CACHE_BYTES`, and always the current set.
        The returned array is the cached one: do not write to it.
        """
        if name not in self._kept:
            self._kept[name] = self._embed(texts)
            while len(self._kept) > 1 and self._size() > CACHE_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name][layer]

    def halve(self) -> bool:
        """Halve the batches from now on; return False if they hold only one text already."""
        smaller = self._batch.halved()
        self._batch = smaller or self._batch
        return smaller is not None

    def _size(self) -> int:
        return sum(layer.nbytes for kept in self._kept.values() for layer in kept)

    def _embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        ids = tokenize(self.loaded, texts, self._max_tokens)
        self.forwards += 1
        return pooled(self.loaded, ids, size=self._batch, final_norm=self._final_norm)


def pooled(
    loaded: LoadedModel,
    ids: Sequence[list[int]],
    *,
    size: BatchSize,
    final_norm: FinalNorm = "raw",
) -> list[np.ndarray]:
    """Return the mean over each text's tokens by layer, float32 ``(len(ids), d)``, from one pass.

    Texts with the same tokens have the same row, to the last bit.
    """
    import numpy as np

    different = Distinct.of(ids)
    layers: list[np.ndarray] = []

    def pool(layer: int, states: Tensor, batch: Batch) -> None:
        if layer == len(layers):
            layers.append(np.zeros((len(different.ids), states.shape[-1]), np.float32))
        layers[layer][batch.rows] = mean_pool(states, batch.lengths).cpu().numpy()

    forward(loaded, different.ids, pool, size=size, final_norm=final_norm)
    repeated = len(different.ids) < len(ids)
    return [rows[different.at] for rows in layers] if repeated else layers


def mean_pool(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over the real tokens of ``(b, t, d)``: ``(b, d)``, in the states' dtype."""
    import torch

    mask = torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(1)
    return (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1)
