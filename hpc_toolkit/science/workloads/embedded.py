"""Base class of workloads that score embeddings of texts: options, loading, out-of-memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.science.workloads.checkpoints import free_cached_memory, load_checkpoint, locate
from hpc_toolkit.science.workloads.contentcache import SharedEmbeddings, digest_of_checkpoint
from hpc_toolkit.science.workloads.embeddings import LayerEmbeddings
from hpc_toolkit.science.workloads.nodecache import local_copy
from hpc_toolkit.science.workloads.onepass import BatchSize, require_final_norm
from hpc_toolkit.science.workloads.prefetch import prefetch_checkpoint
from hpc_toolkit.science.workloads.requirements import require_one_stack, require_positive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.science.workloads.checkpoints import LoadedModel
    from hpc_toolkit.science.workloads.onepass import FinalNorm


class EmbeddedTexts:
    """Base class of workloads whose context is the `SharedEmbeddings` of a checkpoint."""

    def __init__(
        self,
        *,
        root: str = ".",
        max_tokens: int = 64,
        batch_size: int = 32,
        max_batch_tokens: int | None = None,
        final_norm: FinalNorm = "raw",
        cache: str | None = None,
    ) -> None:
        """Options of the workload.

        Args:
            root: the directory that contains the checkpoints.
            max_tokens: longer texts are cut.
            batch_size: the most texts that go through a model together.
            max_batch_tokens: the most tokens that go through it together, padding included.
            final_norm: whether layers before the last are taken as they are (``raw``) or after the
                model's final norm (``paper``), as in a model that was cut off at that layer.
            cache: a directory for embeddings, shared by workers and runs; none by default.

        Raises:
            ConfigError: an option is invalid.
        """
        self._root = root
        self._max_tokens = require_positive("max_tokens", max_tokens)
        if max_batch_tokens is not None:
            require_positive("max_batch_tokens", max_batch_tokens)
        self._size = BatchSize(require_positive("batch_size", batch_size), max_batch_tokens)
        self._final_norm = require_final_norm(final_norm)
        self._cache = Path(cache).expanduser() if cache else None
        self.loads = 0
        """Models loaded so far."""

    def prefetch(self, group: str) -> None:
        """Prefetch the files of a checkpoint; see `prefetch_checkpoint`."""
        prefetch_checkpoint(self._root, group)

    def load(self, group: str) -> SharedEmbeddings:
        """Load a checkpoint; texts are embedded when a task first asks for them.

        Raises:
            PermanentError: the checkpoint cannot be used.
        """
        loaded = load_checkpoint(self._root, group)
        self.loads += 1
        require_one_stack(loaded)
        embeddings = LayerEmbeddings(
            loaded,
            max_tokens=self._max_tokens,
            batch_size=self._size.texts,
            max_batch_tokens=self._size.tokens,
            final_norm=self._final_norm,
        )
        return SharedEmbeddings(
            embeddings, directory=self._cache, identity=lambda: self._identity(loaded)
        )

    def on_oom(self, context: SharedEmbeddings | None, items: list[dict[str, Any]]) -> bool:
        """Halve the batches, for this and later checkpoints.

        Return False at one text each, and if the model alone does not fit.
        """
        if context is None:
            return False
        smaller = context.halve()
        self._size = self._size.halved() or self._size
        free_cached_memory()
        return smaller

    def _identity(self, loaded: LoadedModel) -> Mapping[str, Any]:
        import transformers

        with local_copy(locate(self._root, loaded.name)) as directory:
            checkpoint = digest_of_checkpoint(directory)
        return {
            "checkpoint": checkpoint,
            "max_tokens": self._max_tokens,
            "pooling": "mean",
            "final_norm": self._final_norm,
            "dtype": "float32",
            "device": loaded.device.type,
            "transformers": transformers.__version__,
        }
