"""What workloads that score embeddings of texts share: options, loading, too little memory."""

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
    """The part of a workload that makes a checkpoint's `SharedEmbeddings` its context."""

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
            root: the directory below which checkpoints are.
            max_tokens: longer texts are cut.
            batch_size: texts that go through a model together, at most.
            max_batch_tokens: tokens that go through it together, at most, padding included.
            final_norm: whether layers before the last are taken as they are (``raw``) or behind the
                model's final norm (``paper``), as models return them that were cut off there.
            cache: a directory for embeddings, shared by workers and runs; none by default.

        Raises:
            ConfigError: an option that cannot be.
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
        """Bring the files of a checkpoint nearer; see `prefetch_checkpoint`."""
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
        """Halve the batches, for this checkpoint and those to come.

        False at one text each, and where the model alone does not fit.
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
