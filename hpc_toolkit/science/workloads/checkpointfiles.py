"""List the files of a checkpoint's directory that loading the model reads.

A trainer also leaves its optimizer, its random state and often a second copy of the weights in the
directory: three to four times the size of the files that loading reads. Code that copies, hashes or
prefetches a checkpoint uses this list.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_toolkit.errors import PermanentError

SETTINGS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.codes",
    "*.spm",
    "*.tokenizer",
)
"""Files of the configuration and of any kind of tokenizer."""

WEIGHTS = ("*.safetensors",)
"""Weights on the hub."""

PICKLED_WEIGHTS = ("pytorch_model*.bin",)
"""Weights on the hub of a revision without `WEIGHTS`."""

# In transformers' order: it loads the first file that exists, whatever other files there are.
_WHOLE_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFile:
    """A file that a model or its tokenizer is loaded from."""

    name: str
    """Path relative to the checkpoint's directory; has slashes if an index names shards so."""
    size: int
    """Bytes; for a link, the bytes of its target, as in the hub's cache."""
    changed_ns: int
    """Time of the last write in ns, by the clock of its filesystem."""


def checkpoint_files(directory: Path) -> list[CheckpointFile]:
    """Return the files that loading a checkpoint reads, sorted by name.

    These are the settings, the tokenizer, and the set of weights that transformers chooses; nothing
    else in the directory, and only regular files. Reads the index of sharded weights, but none of
    the other files. Raises PermanentError: an index of weights is damaged, or leads out of the
    directory. Raises OSError: weights are missing, or the directory cannot be read.
    """
    settings = {
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".")
        and any(fnmatchcase(path.name, pattern) for pattern in SETTINGS)
        and path.is_file()
    }
    found = []
    for name in sorted(settings.union(weight_names(directory))):
        status = (directory / name).stat()
        found.append(CheckpointFile(name, status.st_size, status.st_mtime_ns))
    return found


def weight_names(directory: Path) -> list[str]:
    """Return the names of the weights that transformers loads, whether the files exist or not.

    Raises PermanentError: the index that names them is damaged, or leads out of the directory.
    """
    for name in _WHOLE_OR_INDEX:
        if (directory / name).is_file():
            return _shards(directory / name) if name.endswith(".json") else [name]
    return [_WHOLE_OR_INDEX[0]]


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises PermanentError: the file is missing, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PermanentError(f"{path}: missing, so this is not a checkpoint") from None
    except ValueError as error:
        raise PermanentError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise PermanentError(f"{path}: holds {type(content).__name__}, not an object")
    return content


def _shards(index: Path) -> list[str]:
    named = read_object(index).get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else []
    if not names or not all(isinstance(name, str) and _is_inside(name) for name in names):
        raise PermanentError(f"{index}: its weight_map does not name files of this checkpoint")
    return sorted(set(names))


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts
