"""Embeddings of texts by their content: shared by all tasks and layers of a checkpoint, and on disk
by all processes that are told of one directory.

A file holds one checkpoint's embeddings of one list of texts at all layers: a line of JSON with the
number of texts and the width of each layer (they need not be equal), then the layers in turn, each
little-endian float32 row by row. Its name is a hash of all they depend on, so files are never stale
and any of them may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.science.workloads.checkpointfiles import checkpoint_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np

    from hpc_toolkit.science.workloads.embeddings import LayerEmbeddings

LIST_BYTES = 2**28
"""Longer lists of texts are embedded in parts of this size, all layers counted, so that no part
takes more memory; parts are kept and found again like lists."""

_FORMAT = 2
_LONGEST_HEADER = 2**20


class SharedEmbeddings:
    """The embeddings of one checkpoint, the context of its tasks.

    In memory the lists used last are kept (`embeddings.CACHE_BYTES`). With a ``directory``, what is
    there is read from there, layer by layer, and what is not is written there, as
    ``4 * texts * width`` bytes a layer.
    """

    def __init__(
        self,
        embeddings: LayerEmbeddings,
        *,
        directory: Path | None = None,
        identity: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """``identity`` is all that the embeddings depend on besides the texts; asked for once."""
        self.layers = embeddings.layers
        """Hidden states: the blocks and the embeddings (layer 0)."""
        self.loaded = embeddings.loaded
        """The model."""
        self.name = embeddings.loaded.name
        """The checkpoint."""
        self._embeddings = embeddings
        self._directory = directory
        self._identity = identity
        self._known: bytes | None = None

    @property
    def forwards(self) -> int:
        """Passes of the model over a list of texts so far."""
        return self._embeddings.forwards

    def of(self, texts: Sequence[str], layer: int) -> np.ndarray:
        """Float32 ``(len(texts), d)``, the mean over each text's tokens; read-only, since the other
        tasks of the checkpoint get the same rows.
        """
        import numpy as np

        parts = [self._part(part, layer) for part in self._parts(texts)]
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        rows.flags.writeable = False
        return rows

    def halve(self) -> bool:
        """Run smaller batches from now on; False where they hold one text already."""
        return self._embeddings.halve()

    def _parts(self, texts: Sequence[str]) -> Iterator[Sequence[str]]:
        width = int(self.loaded.model.config.hidden_size)
        size = max(1, LIST_BYTES // (4 * self.layers * width))
        for start in range(0, max(1, len(texts)), size):
            yield texts[start : start + size]

    def _part(self, texts: Sequence[str], layer: int) -> np.ndarray:
        digest = digest_of_texts(texts)
        if self._directory is None:
            return self._embeddings.of(digest, texts, layer)
        path = self._path(self._directory, digest)
        stored = _read(path, self.layers, len(texts), layer)
        if stored is not None:
            return stored
        rows = [self._embeddings.of(digest, texts, each) for each in range(self.layers)]
        _write(path, rows)
        return rows[layer]

    def _path(self, directory: Path, digest: str) -> Path:
        if self._known is None:
            identity = {"format": _FORMAT, **self._identity()}
            self._known = json.dumps(identity, sort_keys=True, allow_nan=False).encode()
        name = hashlib.sha256(self._known + b"\n" + digest.encode()).hexdigest()
        # A level of directories: some filesystems are slow with very many names in one.
        return directory / name[:2] / f"{name}.rows"


def digest_of_texts(texts: Sequence[str]) -> str:
    """SHA-256 of a list of texts; where one ends and the next begins counts."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def digest_of_checkpoint(directory: Path) -> str:
    """SHA-256 of the names and the bytes of a checkpoint's files: weights, settings, tokenizer.

    Reads all of them once, which loading the model has just done.
    """
    digest = hashlib.sha256()
    for one in checkpoint_files(directory):
        with (directory / one.name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{one.name}\0{content}\n".encode())
    return digest.hexdigest()


def _read(path: Path, layers: int, count: int, layer: int) -> np.ndarray | None:
    """One layer of a file; None where there is no whole file of so many texts and layers.

    It is not memory-mapped: on NFS, a file that another host replaces or deletes meanwhile would
    end this process by SIGBUS.
    """
    import numpy as np

    try:
        with path.open("rb") as file:
            widths = _widths(file.readline(_LONGEST_HEADER), layers, count)
            start = file.tell()
            size = os.fstat(file.fileno()).st_size
            if widths and size == start + 4 * count * sum(widths):
                file.seek(start + 4 * count * sum(widths[:layer]))
                rows = np.fromfile(file, "<f4", count * widths[layer])
                return rows.reshape(count, widths[layer])
        why: object = "it is cut short, or holds something else"
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error
    logging.getLogger(__name__).warning("%s is not used: %s", path, why)
    return None


def _widths(line: bytes, layers: int, count: int) -> list[int]:
    """The widths of all layers that a file's first line tells; none where it is not such a line."""
    header = json.loads(line)
    if not isinstance(header, dict) or header.get("texts") != count:
        return []
    widths = header.get("widths")
    if not isinstance(widths, list) or len(widths) != layers:
        return []
    return widths if all(type(width) is int and width > 0 for width in widths) else []


def _write(path: Path, rows: Sequence[np.ndarray]) -> None:
    """Keep ``rows``, one array a layer; a disk that is full costs the copy, not the score."""
    import numpy as np

    header = {"texts": len(rows[0]), "widths": [one.shape[1] for one in rows]}
    content = itertools.chain(
        [json.dumps(header).encode() + b"\n"],
        (np.ascontiguousarray(one, dtype="<f4").tobytes() for one in rows),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        logging.getLogger(__name__).warning("%s is not kept: %s", path, error)
