"""Mean-pooled embeddings of texts, cached by content for all tasks and layers of a checkpoint.

One forward pass gives all layers of a text set. On disk, all processes that use the same directory
share the cache. A file of numpy's npz format has one checkpoint's embeddings of one list of texts,
an array of float32 for each layer. Its name is a hash of everything that the embeddings depend on,
so files are never stale, and any file may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.science.workloads import onepass
from hpc_toolkit.science.workloads.checkpoints import LoadedModel, checkpoint_files, locate

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
Parts are cached like lists."""

_FORMAT = 3


class SharedEmbeddings:
    """The embeddings of one checkpoint, the context of its tasks.

    The most recently used lists of texts are kept in memory, up to `CACHE_BYTES`, and always the
    last one. With a ``directory``, lists are read from it layer by layer if they are there, and
    written to it otherwise, as ``4 * texts * width`` bytes per layer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_tokens: int,
        size: onepass.BatchSize,
        final_norm: onepass.FinalNorm = "raw",
        directory: Path | None = None,
        identity: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """``identity`` returns what the embeddings depend on besides the texts; called once."""
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
        self._kept: OrderedDict[str, list[np.ndarray]] = OrderedDict()
        self._directory = directory
        self._identity = cache(identity)

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
        # As JSON, because the digest must depend on where each text ends.
        digest = hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest][layer]
        path = self._path(self._directory, digest) if self._directory else None
        if path and (stored := _read(path, self.layers, len(texts), layer)) is not None:
            return stored
        rows = self._kept[digest] = self.embed(texts)
        while len(self._kept) > 1 and self._kept_bytes() > CACHE_BYTES:
            self._kept.popitem(last=False)
        if path:
            _write(path, rows)
        return rows[layer]

    def _kept_bytes(self) -> int:
        return sum(layer.nbytes for kept in self._kept.values() for layer in kept)

    def _path(self, directory: Path, digest: str) -> Path:
        identity = {"format": _FORMAT, **self._identity()}
        known = json.dumps(identity, sort_keys=True, allow_nan=False)
        name = hashlib.sha256(f"{known}\n{digest}".encode()).hexdigest()
        # Subdirectories, since some filesystems are slow with very many names in one directory.
        return directory / name[:2] / f"{name}.npz"


def digest_of_checkpoint(directory: Path) -> str:
    """Return the SHA-256 of the names and bytes of a checkpoint's weights, settings and tokenizer.

    Reads all of these files once, just after the model was loaded from them.
    """
    digest = hashlib.sha256()
    for name in checkpoint_files(directory):
        with (directory / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _read(path: Path, layers: int, count: int, layer: int) -> np.ndarray | None:
    """Read one layer of a file; None without a complete file of this many texts and layers.

    The file is not memory-mapped: on NFS, SIGBUS would end this process if another host replaced or
    deleted the file meanwhile.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            rows: np.ndarray = stored[f"arr_{layer}"]
            if len(stored.files) == layers and rows.ndim == 2 and len(rows) == count:
                return rows
        why: object = "it holds something else"
    except FileNotFoundError:
        return None
    # The last is an npy file, which numpy returns as an array.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, TypeError) as error:
        why = error
    logging.getLogger(__name__).warning("%s is not used: %s", path, why)
    return None


def _write(path: Path, rows: Sequence[np.ndarray]) -> None:
    """Write ``rows``, one array per layer; if the disk is full, only the copy is lost."""
    content = io.BytesIO()
    np.savez(content, *rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [content.getvalue()])
    except OSError as error:
        logging.getLogger(__name__).warning("%s is not kept: %s", path, error)


class EmbeddedTexts(onepass.OfCheckpoints):
    """Base class of workloads whose context is the `SharedEmbeddings` of a checkpoint."""

    def __init__(self, *, cache: str | None = None, **options: Any) -> None:
        """``cache`` is a directory for embeddings, shared by workers and runs; the other options
        are those of `OfCheckpoints`.
        """
        super().__init__(**options)
        self._cache = Path(cache).expanduser() if cache else None

    def load(self, group: str) -> SharedEmbeddings:
        """Load a checkpoint; texts are embedded when a task first needs them."""
        loaded = self.load_model(group)
        return SharedEmbeddings(
            loaded,
            max_tokens=self._max_tokens,
            size=self._size,
            final_norm=self._final_norm,
            directory=self._cache,
            identity=lambda: self._identity(loaded),
        )

    def on_oom(self, context: SharedEmbeddings | None, items: list[dict[str, Any]]) -> bool:
        """Halve the batches, for this and later checkpoints.

        Return False at one text each, and if the model alone does not fit.
        """
        if context is None or not self.halve():
            return False
        context.size = self._size
        return True

    def _identity(self, loaded: LoadedModel) -> Mapping[str, Any]:
        import transformers

        return {
            "checkpoint": digest_of_checkpoint(locate(self._root, loaded.name)),
            "max_tokens": self._max_tokens,
            "pooling": "mean",
            "final_norm": self._final_norm,
            "dtype": "float32",
            "device": loaded.device.type,
            "transformers": transformers.__version__,
        }
