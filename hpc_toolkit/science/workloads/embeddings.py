"""Mean-pooled embeddings of texts, kept in memory for all tasks and layers of a checkpoint.

One forward pass gives all layers of a text set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor


CACHE_BYTES = 2**30
"""Embeddings that a context keeps in memory: the most recently used text sets, up to this size."""


def pooled(
    loaded: LoadedModel,
    ids: Sequence[list[int]],
    *,
    size: onepass.BatchSize,
    final_norm: onepass.FinalNorm = "raw",
    mean: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """Return the mean over each text's tokens by layer, ``(len(ids), d)``, from one pass.

    Texts with the same tokens have the same row, to the last bit. The rows are on the CPU.
    ``mean`` takes the states and lengths of a batch; by default it is :func:`mean_pool`.
    """
    different, at = onepass.distinct(ids)
    layers: list[Tensor] = []

    def pool(layer: int, states: Tensor, batch: onepass.Batch) -> None:
        rows = (mean or mean_pool)(states, batch.lengths).cpu()
        if layer == len(layers):
            layers.append(rows.new_zeros(len(different), rows.shape[-1]))
        layers[layer][batch.rows] = rows

    onepass.forward(loaded, different, pool, size=size, final_norm=final_norm)
    return [rows[at] for rows in layers] if len(different) < len(ids) else layers


def mean_pool(states: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean over the real tokens of ``(b, t, d)``: ``(b, d)``, in the states' dtype."""
    import torch

    mask = torch.arange(states.shape[1], device=states.device) < lengths.unsqueeze(1)
    return (states * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(1)


LIST_BYTES = 2**28
"""Longer lists of texts are embedded in parts of this size, counting all layers, to limit memory.
Parts are kept like lists."""


class SharedEmbeddings:
    """The embeddings of one checkpoint, the context of its tasks.

    The most recently used lists of texts are kept in memory, up to `CACHE_BYTES`, and always the
    last one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_tokens: int,
        size: onepass.BatchSize,
        final_norm: onepass.FinalNorm = "raw",
    ) -> None:
        self.layers = onepass.layer_count(loaded)
        """Number of hidden states: the blocks and the embeddings (layer 0)."""
        self.loaded = loaded
        self.name = loaded.name
        self.forwards = 0
        """Number of forward passes over a list of texts so far."""
        self._max_tokens = max_tokens
        self.size = size
        """The size of the next batches."""
        self._final_norm = final_norm
        self._kept: OrderedDict[tuple[str, ...], list[np.ndarray]] = OrderedDict()

    def of(self, texts: Sequence[str], layer: int) -> np.ndarray:
        """Return float32 ``(len(texts), d)``, the mean over each text's tokens.

        It is read-only, since the other tasks of the checkpoint get the same rows.
        """
        parts = [self._part(part, layer) for part in self._parts(texts)]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        rows.flags.writeable = False
        return rows

    def embed(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the embeddings of all layers from one forward pass."""
        ids = onepass.tokenize(self.loaded, texts, self._max_tokens)
        self.forwards += 1
        layers = pooled(self.loaded, ids, size=self.size, final_norm=self._final_norm)
        return [rows.numpy() for rows in layers]

    def _parts(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        width = int(self.loaded.model.config.hidden_size)
        size = max(1, LIST_BYTES // (4 * self.layers * width))
        for start in range(0, max(1, len(texts)), size):
            yield texts[start : start + size]

    def _part(self, texts: Sequence[str], layer: int) -> np.ndarray:
        key = tuple(texts)
        if key in self._kept:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = self.embed(texts)
            while len(self._kept) > 1 and self._kept_bytes() > CACHE_BYTES:
                self._kept.popitem(last=False)
        return self._kept[key][layer]

    def _kept_bytes(self) -> int:
        return sum(layer.nbytes for kept in self._kept.values() for layer in kept)


class EmbeddedTexts(onepass.OfCheckpoints):
    """Base class of workloads whose context is the `SharedEmbeddings` of a checkpoint."""

    def load(self, group: str) -> SharedEmbeddings:
        """Load a checkpoint; texts are embedded when a task first needs them."""
        loaded = self.load_model(group)
        return SharedEmbeddings(
            loaded,
            max_tokens=self._max_tokens,
            size=self._size,
            final_norm=self._final_norm,
        )

    def on_oom(self, context: SharedEmbeddings | None, items: list[dict[str, Any]]) -> bool:
        """Halve the batches, for this and later checkpoints.

        Return False at one text each, and if the model alone does not fit.
        """
        if context is None or not self.halve():
            return False
        context.size = self._size
        return True
