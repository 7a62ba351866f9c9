"""Bring the files of the next checkpoint nearer while the present one is computed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.workloads import nodecache
from hpc_toolkit.workloads.checkpoints import locate

if TYPE_CHECKING:
    from pathlib import Path


def prefetch_checkpoint(root: str | Path, checkpoint: str) -> None:
    """Copy a checkpoint to the node's cache, or have the kernel read it ahead where there is none.

    May be called from a thread beside the one that computes, soon before the checkpoint is loaded
    or never; it imports no torch. A checkpoint that cannot be had is left to whoever loads it, who
    then says why.
    """
    with contextlib.suppress(HpcToolkitError, OSError):
        directory = locate(root, checkpoint)
        with nodecache.local_copy(directory) as copy:
            if copy == directory:
                for path in directory.iterdir():
                    _read_ahead(path)


def _read_ahead(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(fd)
