"""Check that this node is fit for a job: its GPUs, its view of the run, the free space.

Runs once on every node before the ranks start, because a fault found later costs hours.
"""

from __future__ import annotations

import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from hpc_toolkit import __version__
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.system.gpus import ask_driver
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.ranks import host_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_GRANTED = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NO_DEVICE = ("", "-1", "NoDevFiles")
_FREE_FILES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    node: str
    problems: tuple[str, ...]
    """Why the node is not fit; empty if it is."""
    facts: tuple[str, ...]

    def line(self) -> str:
        if self.problems:
            return f"{self.node}: {'; '.join(self.problems)}"
        return f"{self.node}: ready: {', '.join(self.facts)}"


def check_node(run: Path | None, *, gpus: int, free_bytes: int) -> NodeReport:
    """Check this node.

    A process alone on it must see ``gpus`` GPUs, and ``free_bytes`` must be free below ``run``, the
    directory that ranks will write to; None if they write to none.
    """
    problems: list[str] = []
    facts = [f"hpctk {__version__}", f"Python {platform.python_version()}"]
    if gpus:
        seen = usable_gpus(os.environ)
        if seen < gpus:
            problems.append(f"only {seen} of {counted(gpus, 'GPU')} are there")
        facts.append(counted(seen, "GPU"))
    if run is not None:
        _check_run(run, free_bytes, problems, facts)
    return NodeReport(node=host_name(), problems=tuple(problems), facts=tuple(facts))


def usable_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that Slurm grants in ``environ`` and that answer NVIDIA's driver.

    Without NVIDIA's library only the grant counts. It alone counts for MIG partitions too
    (``MIG-...``), because the library counts complete GPUs. 0 if there is no sign of a GPU.
    """
    listed = next((environ[name] for name in _GRANTED if name in environ), None)
    granted = _granted(listed) if listed is not None else None
    if granted is not None and any(word.startswith("MIG-") for word in granted):
        return len(granted)
    counts = [] if granted is None else [len(granted)]
    if (told := ask_driver()) is not None:
        counts.append(sum("error" not in gpu for gpu in told.get("gpus", ())))
    return min(counts, default=0)


def _granted(listed: str) -> list[str]:
    """Return the devices in the list up to the first invalid word, as CUDA reads it.

    Slurm and sites write ``NoDevFiles`` or ``-1`` for a job without GPUs.
    """
    words = [word.strip() for word in listed.rstrip(",").split(",")]
    return list(takewhile(lambda word: word not in _NO_DEVICE, words))


def _check_run(run: Path, free_bytes: int, problems: list[str], facts: list[str]) -> None:
    try:
        read_manifest(run)
    except HpcToolkitError as error:
        problems.append(error.message)
        return
    for directory in (RunPaths(run).workers, RunPaths(run).journals):
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                file.write(b"x")
        except OSError as error:
            problems.append(f"cannot write to {directory}: {error.strerror}")
            break
    with suppress(OSError):
        space = os.statvfs(run)
        free = space.f_bavail * space.f_frsize
        if free < free_bytes:
            problems.append(f"only {format_size(free)} are free for {run}")
        facts.append(f"{format_size(free)} free for {run}")
        # Some filesystems report no number of files.
        if space.f_files and space.f_favail < _FREE_FILES:
            problems.append(f"room for {counted(space.f_favail, 'more file')} below {run}")
