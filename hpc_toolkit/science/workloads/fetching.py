"""Download checkpoints from the hub before a job needs them: sizes first, each file once.

A download that is repeated continues: complete files are in the hub's cache, and of others the part
that has arrived. Imports huggingface_hub when it is used.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.science.workloads.checkpointfiles import PICKLED_WEIGHTS, SETTINGS, WEIGHTS
from hpc_toolkit.science.workloads.checkpoints import locate
from hpc_toolkit.system.quantities import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

LEFT_FREE = 2**30
"""Bytes of the cache's disk that a download leaves free."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a download needs."""

    checkpoints: tuple[str, ...]
    """Those that are not in the cache, as ``name@revision``."""
    sizes: dict[str, int]
    """Bytes of each of them."""
    cached: int
    """Number of checkpoints that are in the cache."""
    errors: dict[str, str]
    """Why the hub's answer about a checkpoint is missing."""
    cache: Path
    free: int
    """Free bytes on the cache's disk."""

    @property
    def total(self) -> int:
        return sum(self.sizes.values())

    def check_space(self) -> None:
        """Raise ConfigError if the disk is too small."""
        if self.total + LEFT_FREE > self.free:
            needed, free = format_size(self.total), format_size(self.free)
            message = f"{self.cache}: {free} are free, and the checkpoints need {needed}"
            hint = "set HF_HOME to a directory on a larger filesystem"
            raise ConfigError(message, hint=hint)


def on_hub(items: Iterable[dict[str, Any]]) -> list[str]:
    """The checkpoints of items that are names on the hub, each once.

    Raises ConfigError: an item has no checkpoint, or none of the checkpoints is on the hub.
    """
    found: dict[str, None] = {}
    for number, item in enumerate(items, 1):
        if not isinstance(name := item.get("checkpoint"), str):
            message = f"item {number} has no checkpoint: {str(item)[:100]}"
            raise ConfigError(message, hint="items have the key 'checkpoint', name@revision")
        if "@" in name:
            found[name] = None
    if not found:
        message = "no checkpoint of these items is on the hub"
        raise ConfigError(message, hint="checkpoints on the hub are called name@revision")
    return list(found)


def needs(checkpoints: Sequence[str], jobs: int) -> Needs:
    """Ask the hub for the sizes of the checkpoints that are not in the cache.

    Raises ConfigError if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        message = "HF_HUB_OFFLINE is set, so nothing can be downloaded"
        raise ConfigError(message, hint="unset it for this command")
    sizes: dict[str, int] = {}
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        asked = {pool.submit(_size, name): name for name in checkpoints}
        for future in as_completed(asked):
            name = asked[future]
            try:
                sizes[name] = future.result()
            except Exception as error:  # noqa: BLE001 - reported with the checkpoint's name
                errors[name] = _line(error)
    missing = tuple(name for name in checkpoints if sizes.get(name))
    cache = Path(HF_HUB_CACHE)
    nearest = next(one for one in (cache, *cache.absolute().parents) if one.exists())
    return Needs(
        missing,
        {name: sizes[name] for name in missing},
        sum(size == 0 for size in sizes.values()),
        errors,
        cache,
        shutil.disk_usage(nearest).free,
    )


def _size(checkpoint: str) -> int:
    """Bytes of the files of a checkpoint that loading reads and the cache lacks."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    name, _, revision = checkpoint.partition("@")
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    files = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    weights = WEIGHTS if any(fnmatchcase(one, WEIGHTS[0]) for one in files) else PICKLED_WEIGHTS
    wanted = [one for one in files if any(fnmatchcase(one, p) for p in (*SETTINGS, *weights))]
    if not wanted:
        raise ConfigError(f"{checkpoint} has no files that a model is loaded from")
    return sum(
        files[one]
        for one in wanted
        if not isinstance(try_to_load_from_cache(name, one, revision=info.sha), str)
    )


def download(checkpoints: Sequence[str], jobs: int) -> Iterator[tuple[str, str | None]]:
    """Download checkpoints, ``jobs`` at once; yield each that has ended, and its error or None."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    pool = ThreadPoolExecutor(jobs)
    try:
        asked = {pool.submit(locate, "", name): name for name in checkpoints}
        for future in as_completed(asked):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield asked[future], None if error is None else _line(error)
    finally:
        # After Ctrl-C, those that have not begun do not begin.
        pool.shutdown(cancel_futures=True)


def _line(error: BaseException) -> str:
    text = error.message if isinstance(error, HpcToolkitError) else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]
