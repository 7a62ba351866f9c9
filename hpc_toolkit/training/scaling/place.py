"""Create and check the directory of a scaling run before a rank starts."""

from __future__ import annotations

import errno
import os
import tempfile
from typing import TYPE_CHECKING

from hpc_toolkit.errors import PASSING, ConfigError
from hpc_toolkit.training.scaling.records import DIRECTORY

if TYPE_CHECKING:
    from pathlib import Path

LEAST_FREE = 16 * 2**20
"""Bytes that must be free for the ranks' logs, the records and the monitor's samples."""


def prepare(directory: Path) -> None:
    """Create the directory and write to it.

    Raises:
        ConfigError: the directory cannot be created or written to.
        OSError: there is no room, or the filesystem does not answer; a later call may succeed.
    """
    try:
        (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
        check_room(directory)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in PASSING:
            raise
        message = f"-o {directory}: cannot be written to: {error.strerror}"
        raise ConfigError(message, hint="name a directory that all nodes can write to") from error


def check_room(directory: Path) -> None:
    """Raise OSError (ENOSPC) if there is no room for a measurement."""
    space = os.statvfs(directory)
    if space.f_bavail * space.f_frsize < LEAST_FREE:
        words = f"less than {LEAST_FREE // 2**20} MiB are free"
        raise OSError(errno.ENOSPC, words, str(directory))
