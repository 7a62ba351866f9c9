"""Bring the files of the next checkpoint nearer while the present one is computed."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.science.workloads import nodecache
from hpc_toolkit.science.workloads.checkpointfiles import checkpoint_files
from hpc_toolkit.science.workloads.checkpoints import locate

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK = 2**20


def prefetch_checkpoint(root: str | Path, checkpoint: str) -> None:
    """Copy a checkpoint to the node's cache, or have the kernel keep it where there is none.

    May be called from a thread beside the one that computes, soon before the checkpoint is loaded
    or never; it imports no torch, and holds a mebibyte of what it reads. A checkpoint that cannot
    be had is left to whoever loads it, who then says why.
    """
    with contextlib.suppress(HpcToolkitError, OSError):
        directory = locate(root, checkpoint)
        with nodecache.local_copy(directory) as copy:
            if copy == directory:
                for file in checkpoint_files(directory):
                    _read_ahead(directory / file.name)


def _read_ahead(path: Path) -> None:
    """Read a file to its end. The kernel's own means, POSIX_FADV_WILLNEED, begins it alone: of 200
    MB on ext4 it read 8."""
    # A FIFO that took the file's place would never be opened.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            buffer = bytearray(_CHUNK)
            while os.readv(fd, [buffer]):
                continue
    finally:
        os.close(fd)
