"""Workloads that evaluate models, and what those of task harnesses share about their data sets.

The data sets of tasks come through the package ``datasets``, whose errors become errors of an item
here. Imports huggingface_hub when it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpc_toolkit.errors import HpcToolkitError, PermanentError, WorkloadError, describe
from hpc_toolkit.system.installation import how_to_add
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
