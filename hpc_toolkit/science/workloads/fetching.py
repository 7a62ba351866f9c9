"""Download checkpoints and data sets before a job needs them, and explain which ones are missing.

A download of checkpoints that is repeated continues: complete files are in the hub's cache, and of
others the part that has arrived. Data sets of evaluation tasks come through the package
``datasets``, whose errors become errors of an item here. Imports huggingface_hub when it is used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError, PermanentError, WorkloadError, describe
from hpc_toolkit.science.workloads.checkpoints import (
    PICKLED_WEIGHTS,
    SETTINGS,
    WEIGHTS,
    first_line,
    locate,
    verify,
)
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.quantities import format_size
from hpc_toolkit.system.ranks import RankInfo

TASK = "task"
"""The key of an item that names its task."""


def fetch_data(
    items: Iterable[Mapping[str, Any]], load_task: Callable[[object], object]
) -> Iterator[tuple[str, str]]:
    """Load the data set of each task once, without a model; yield the task and its error or "".

    With a network this downloads and converts the data sets. With HF_HUB_OFFLINE it finds those
    that a job without a network would miss.
    """
    names = {json.dumps(name): name for name in (item.get(TASK) for item in items)}
    for text, name in names.items():
        try:
            load_task(name)
        except HpcToolkitError as error:
            yield text, error.message
        except Exception as error:  # noqa: BLE001 - a harness and its tasks may raise anything
            yield text, f"task {text}: {describe(error)}"
        else:
            yield text, ""


def no_network_in_jobs() -> None:
    """Set HF_HUB_OFFLINE in a job unless it is set; call this before the first import of the hub.

    Compute nodes often have no network, where each access waits for a time limit; and on those that
    have one, many ranks would ask the hub at once. ``--env HF_HUB_OFFLINE=0`` permits downloads.
    """
    if RankInfo.from_environ().job_id is not None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextmanager
def harness_package(harness: str, extra: str) -> Iterator[None]:
    """Raise WorkloadError with an installation command if the harness is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"tasks of {harness} need the package {error.name!r}, which is not installed"
        raise WorkloadError(msg, hint=how_to_add(extra=extra)) from error


@contextmanager
def data_of(task: object) -> Iterator[None]:
    """Raise PermanentError if no later attempt can load the data set of a task.

    A data set is missing for good if it does not exist, or if it is not in the cache and
    HF_HUB_OFFLINE is set. A failing network raises the error of ``datasets``.
    """
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except ModuleNotFoundError as error:
        msg = f"task {task!r} needs the package {error.name!r}, which is not installed"
        raise PermanentError(msg, hint=how_to_add(error.name or "")) from error
    except (ConnectionError, FileNotFoundError, ValueError) as error:
        # The last is raised if other configurations of a data set are in the cache.
        unreached = isinstance(error, ConnectionError | LocalEntryNotFoundError)
        uncached = unreached or str(error).startswith("Couldn't find cache")
        if uncached and HF_HUB_OFFLINE:
            msg = (
                f"task {task!r}: its data set is not in the local cache, and HF_HUB_OFFLINE is set"
            )
            hint = "'hpctk items fetch RUN' downloads it, on a node that has network access"
            raise PermanentError(msg, hint=hint) from error
        if uncached or not isinstance(error, FileNotFoundError):
            raise
        raise PermanentError(f"task {task!r}: {error}") from error


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
            raise ConfigError(message, hint="set HF_HOME to a directory on a larger filesystem")


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


def needs(checkpoints: Sequence[str], jobs: int) -> Needs:
    """Ask the hub for the sizes of the checkpoints that are not in the cache.

    Raises ConfigError if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        message = "HF_HUB_OFFLINE is set, so nothing can be downloaded"
        raise ConfigError(message, hint="unset it, or add --offline to see what is missing")
    sizes: dict[str, int] = {}
    errors: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        asked = {pool.submit(_size, name): name for name in checkpoints}
        for future in as_completed(asked):
            name = asked[future]
            try:
                sizes[name] = future.result()
            except Exception as error:  # noqa: BLE001 - reported with the checkpoint's name
                errors[name] = first_line(error)
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


def download(
    checkpoints: Sequence[str], jobs: int, *, check: bool = False
) -> Iterator[tuple[str, str | None]]:
    """Download checkpoints, ``jobs`` at once; yield each that has ended, and its error or None.

    ``check``: verify the files. With HF_HUB_OFFLINE, only those in the cache.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    pool = ThreadPoolExecutor(jobs)
    try:
        get = _verified if check else locate
        asked = {pool.submit(get, "", name): name for name in checkpoints}
        for future in as_completed(asked):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield asked[future], None if error is None else first_line(error)
    finally:
        # After Ctrl-C, those that have not begun do not begin.
        pool.shutdown(cancel_futures=True)


def _verified(root: str, checkpoint: str) -> None:
    verify(locate(root, checkpoint))
