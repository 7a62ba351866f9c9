"""Load the model of an item's ``checkpoint``: a local directory or a revision on the hub.

A checkpoint that no further attempt can load (no weights, a half-written file, a revision that does
not exist) raises PermanentError; a failing network or disk raises other errors. The module also
checks models and options for the workloads, prefetches the files of the next checkpoint, and
downloads checkpoints before a job needs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError, HpcToolkitError, PermanentError
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    import torch

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Type of a model's weights; ``auto`` is the type in which they were saved."""
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

WEIGHTS, PICKLED_WEIGHTS = ("*.safetensors",), ("pytorch_model*.bin",)
"""Weights on the hub, and of a revision without them the pickled ones."""

# In transformers' order: it loads the first file that exists, whatever other files there are.
_WHOLE_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def checkpoint_files(directory: Path) -> list[str]:
    """Return the names of the files that loading a checkpoint reads, sorted.

    These are the settings, the tokenizer, and the set of weights that transformers chooses: a
    trainer also leaves its optimizer, its random state and often a second copy of the weights.
    Raises PermanentError: an index of weights is damaged, or leads out of the directory. Raises
    OSError: the directory cannot be read.
    """
    settings = {
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".")
        and any(fnmatchcase(path.name, pattern) for pattern in SETTINGS)
        and path.is_file()
    }
    return sorted(settings.union(weight_names(directory)))


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
    paths = [PurePosixPath(name) for name in names if isinstance(name, str)]
    inside = all(path.parts and not path.is_absolute() and ".." not in path.parts for path in paths)
    if not names or len(paths) < len(names) or not inside:
        raise PermanentError(f"{index}: its weight_map does not name files of this checkpoint")
    return sorted(set(names))


def require_layer(item: dict[str, Any], layers: int, checkpoint: str) -> int:
    """Return the item's layer, an integer from 0 to ``layers - 1``.

    Raises PermanentError: the layer is missing, or the checkpoint has no such layer.
    """
    layer = item.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        raise PermanentError(f"{checkpoint}: no layer {layer!r}; it has layers 0 to {layers - 1}")
    return layer


def require_positions(loaded: LoadedModel, longest: int) -> None:
    """Require a model that takes texts of ``longest`` tokens.

    A text that is too long raises a shape error on a CPU, and ends the process on a GPU. A model
    with rotary positions would go on, with positions for which it was never trained. Raises
    PermanentError: the model has fewer positions.
    """
    positions = _positions(loaded.model)
    if positions is not None and longest > positions:
        msg = f"{loaded.name}: it takes {positions} tokens, and the longest text has {longest}"
        raise PermanentError(msg, hint=f"set max_tokens to {positions} or less, for all models")


def _positions(model: Any) -> int | None:
    """Return the number of tokens of the longest text that a model takes; None if unknown."""
    from torch.nn import Embedding

    size: object = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(size, int) or size < 1:
        return None
    words = model.get_input_embeddings()
    for module in model.modules():
        if not isinstance(module, Embedding) or module is words:
            continue
        if module.num_embeddings == size and module.padding_idx is not None:
            return size - module.padding_idx - 1  # RoBERTa counts positions after the padding index
    return size


def require_positive(name: str, value: object) -> int:
    """Require an option to be a count.

    Raises ConfigError: the value is not an integer of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {value!r} is not a positive integer")
    return value


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, and its tokenizer."""

    model: Any
    """Called with ``input_ids``, ``attention_mask`` and ``output_hidden_states=True``."""
    tokenizer: Any
    device: torch.device
    name: str
    """The checkpoint as the item names it."""


def load_checkpoint(
    root: str | Path, checkpoint: str, *, head: bool = False, dtype: Dtype = "float32"
) -> LoadedModel:
    """Load ``<root>/<checkpoint>``, or ``name@revision`` from the hub or its local cache.

    ``head``: as a causal model with its language-model head. Raises PermanentError: names the file
    or tensor that is missing, damaged or does not fit the model.
    """
    directory = locate(root, checkpoint)
    verify(directory)
    with quiet_transformers():
        return _load(directory, checkpoint, head=head, dtype=dtype)


def locate(root: str | Path, checkpoint: str) -> Path:
    """Return the directory of a checkpoint; download it from the hub if it is not in the cache."""
    name, at, revision = checkpoint.partition("@")
    if at:
        return _download(name, revision)
    directory = Path(root) / checkpoint
    if not directory.is_dir():
        msg = f"{directory}: no such checkpoint directory"
        hint = "write name@revision for the hub; other paths are relative to 'root'"
        raise PermanentError(msg, hint=hint)
    return directory


def verify(directory: Path) -> None:
    """Reject a directory without configuration or weights, or with truncated weights.

    Reads a few kilobytes: the header of each safetensors file gives the length of the file. Raises
    PermanentError: names the file.
    """
    read_object(directory / "config.json")
    for path in (directory / name for name in weight_names(directory)):
        if not path.is_file():
            msg = f"{path}: weights are missing"
            raise PermanentError(msg, hint="the checkpoint is incomplete; save it again")
        if path.suffix == ".safetensors":
            _verify_safetensors(path)


def pick_device() -> torch.device:
    """Return this rank's accelerator: the only visible one, else the local rank's; or the CPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    names = ("HPCTK_LOCAL_RANK", "LOCAL_RANK", "SLURM_LOCALID")
    local_rank = next(filter(None, map(os.environ.get, names)), "0")
    return torch.device("cuda", int(local_rank) % count)


def _verify_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        header = file.read(length) if length < size else b""
    try:
        tensors = json.loads(header)
        end = max(t["data_offsets"][1] for k, t in tensors.items() if k != "__metadata__")
    except (ValueError, TypeError, KeyError, IndexError):
        msg = f"{path}: not a complete safetensors file: its header cannot be read ({size} bytes)"
        raise PermanentError(msg, hint="the file is incomplete; save it again") from None
    if size != 8 + length + end:
        msg = f"{path}: {size} bytes, but its header says {8 + length + end}"
        raise PermanentError(msg, hint="the file is incomplete; save it again")


def _download(name: str, revision: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))

    try:
        directory = fetch(*SETTINGS, *WEIGHTS)
        if not all((directory / one).is_file() for one in weight_names(directory)):
            directory = fetch(*SETTINGS, *PICKLED_WEIGHTS)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        msg = f"{name}@{revision}: the hub has no such revision: {first_line(error)}"
        raise PermanentError(msg) from error
    except LocalEntryNotFoundError as error:
        if not HF_HUB_OFFLINE:
            raise  # the network failed: a later attempt may not
        msg = f"{name}@{revision}: not in the local cache, and HF_HUB_OFFLINE is set"
        raise PermanentError(msg, hint="download it on a node that has network access") from error
    return directory


def _load(directory: Path, checkpoint: str, *, head: bool, dtype: Dtype) -> LoadedModel:
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    kind = AutoModelForCausalLM if head else AutoModel
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
        model, report = kind.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    except (ValueError, KeyError, SafetensorError) as error:
        raise PermanentError(f"{directory}: cannot be loaded: {first_line(error)}") from error
    lost = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if lost:
        # transformers would fill these with random numbers and continue.
        msg = f"{directory}: the weights lack {counted(len(lost), 'tensor')}, such as {lost[0]}"
        raise PermanentError(msg)
    device = pick_device()
    return LoadedModel(model.eval().to(device), tokenizer, device, checkpoint)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and load reports in the log of a worker that loads many models."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_CHUNK = 2**20


def prefetch_checkpoint(root: str | Path, checkpoint: str) -> None:
    """Read a checkpoint into the kernel's page cache.

    It may be called from another thread than the computing one, soon before the checkpoint is
    loaded or never. It does not import torch, and its buffer is one mebibyte. Errors are ignored:
    loading the checkpoint will report them.
    """
    with contextlib.suppress(HpcToolkitError, OSError):
        directory = locate(root, checkpoint)
        for name in checkpoint_files(directory):
            _read_ahead(directory / name)


def _read_ahead(path: Path) -> None:
    """Read a file to its end. POSIX_FADV_WILLNEED only reads the beginning: of 200 MB on ext4 it
    read 8.
    """
    # Without O_NONBLOCK, opening a FIFO that replaced the file would hang.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            buffer = bytearray(_CHUNK)
            while os.readv(fd, [buffer]):
                continue
    finally:
        os.close(fd)


def on_hub(items: Iterable[dict[str, Any]], *, needed: bool = True) -> list[str]:
    """The checkpoints of items that are names on the hub, each once.

    Raises ConfigError if ``needed``: an item has no checkpoint, or none of them is on the hub.
    """
    found: dict[str, None] = {}
    for number, item in enumerate(items, 1):
        name = item.get("checkpoint")
        if needed and not isinstance(name, str):
            message = f"item {number} has no checkpoint: {str(item)[:100]}"
            raise ConfigError(message, hint="items have the key 'checkpoint', name@revision")
        if isinstance(name, str) and "@" in name:
            found[name] = None
    if needed and not found:
        message = "no checkpoint of these items is on the hub"
        raise ConfigError(message, hint="checkpoints on the hub are called name@revision")
    return list(found)


def download(
    checkpoints: Sequence[str], jobs: int, *, check: bool = False
) -> Iterator[tuple[str, str | None]]:
    """Download checkpoints, ``jobs`` at once; yield each that has ended, and its error or None.

    ``check``: verify the files. With HF_HUB_OFFLINE, only those in the cache. A download that is
    repeated continues: complete files are in the cache, and of others the part that has arrived.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    pool = ThreadPoolExecutor(jobs)
    try:

        def get(name: str) -> None:
            found = locate("", name)
            if check:
                verify(found)

        asked = {pool.submit(get, name): name for name in checkpoints}
        for future in as_completed(asked):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            name = asked[future]
            yield name, None if error is None else first_line(error).removeprefix(f"{name}: ")
    finally:
        # After Ctrl-C, those that have not begun do not begin.
        pool.shutdown(cancel_futures=True)
