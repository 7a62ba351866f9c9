"""Mean-pooled embeddings of texts, all layers of a text set from one forward pass."""

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
"""Embeddings that a context keeps: the text sets used last, up to this size."""


class LayerEmbeddings:
    """Mean-pooled embeddings of named text sets, all layers of a set from one forward pass."""

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
        """Passes over a text set so far."""
        self._max_tokens = max_tokens
        self._batch = BatchSize(batch_size, max_batch_tokens)
        self._final_norm = final_norm
        self._kept: OrderedDict[str, list[np.ndarray]] = OrderedDict()

    def of(self, name: str, texts: Sequence[str], layer: int) -> np.ndarray:
        """Float32 ``(len(texts), d)``; ``name`` stands for ``texts`` and is computed once.

        The sets used last are kept up to `CACHE_BYTES`, and always the one in use. What is handed
        out is what is kept: not to be written to.
        """
        if name not in self._kept:
            self._kept[name] = self._embed(texts)
            while len(self._kept) > 1 and self._size() > CACHE_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name][layer]

    def halve(self) -> bool:
        """Run smaller batches from now on; False where they hold one text already."""
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
    """The mean over each text's tokens, float32 ``(len(ids), d)`` a layer, from one pass.

    Texts of the same tokens have the same row, to the last bit.
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
    """Mean over the real tokens of ``(b, t, d)``, in the dtype of the states: ``(b, d)``."""
    import torch

    mask = torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(1)
    return (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1)
