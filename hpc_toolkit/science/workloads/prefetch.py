"""Prefetch the files of the next checkpoint while the current one is computed."""

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
    """Copy a checkpoint to the node's cache, or without one into the kernel's page cache.

    It may be called from another thread than the computing one, soon before the checkpoint is
    loaded or never. It does not import torch, and its buffer is one mebibyte. Errors are ignored:
    loading the checkpoint will report them.
    """
    with contextlib.suppress(HpcToolkitError, OSError):
        directory = locate(root, checkpoint)
        with nodecache.local_copy(directory) as copy:
            if copy == directory:
                for file in checkpoint_files(directory):
                    _read_ahead(directory / file.name)


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
