"""Copies of files on a node's own disk, made before ranks start and removed by the last of them."""

from __future__ import annotations

import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.environment import USERS
from hpc_toolkit.system.quantities import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SPARE_BYTES = 64 << 20
"""Stays free: a disk that is full to the last byte fails more than this job."""


class StagingError(HpcToolkitError):
    """Something cannot be copied to this node's disk."""


def stage_paths(paths: Sequence[Path], directory: Path, *, users: int) -> str:
    """Copy each path to its name below ``directory``, which is made; say what was copied.

    What links name is copied in their place. Who has used the copies removes its number, from 0 to
    ``users`` - 1, from the directory ``.users``, and who can remove that removes the copies. What
    an earlier start of the same job left on this node is removed: there the parent's name ends in a
    lower number. Nothing is synced, since nothing is kept.

    Raises:
        StagingError: a path is missing, leads to itself or is neither file nor directory, or the
            disk has not the room.
    """
    started = time.monotonic()
    files = [pair for path in paths for pair in _below(path, Path(path.name), ())]
    size = sum(source.stat().st_size for source, _ in files if source.is_file())
    _remove_earlier(directory)
    _make(directory)
    free = shutil.disk_usage(directory).free
    if size + _SPARE_BYTES > free:
        directory.rmdir()
        msg = f"{format_size(size)} do not fit into {format_size(free)} at {directory}"
        raise StagingError(msg, hint="stage less, or to a larger disk: --stage-dir DIR")
    try:
        for source, target in files:
            _copy(source, directory / target)
        for user in range(users):
            (directory / USERS / str(user)).mkdir(parents=True)
    except BaseException as error:
        # Also at SIGTERM: in a job that is cancelled nobody else can remove it.
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            directory.parent.rmdir()
        if not isinstance(error, OSError):
            raise
        msg = f"cannot copy to {directory}: {error.strerror or error}: {error.filename}"
        raise StagingError(msg, hint="is it readable, and the disk writable?") from error
    names = ", ".join(path.name for path in paths)
    return f"staged {names}: {format_size(size)} in {time.monotonic() - started:.1f} s"


def _below(path: Path, target: Path, above: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """A path and all below it, directories first, with their names among the copies."""
    try:
        real = os.path.realpath(path, strict=True)
        mode = path.stat().st_mode
        inside = sorted(path.iterdir()) if stat.S_ISDIR(mode) else []
    except OSError as error:
        msg = f"cannot stage {path}: {error.strerror}"
        raise StagingError(msg, hint="is it there, on every node?") from error
    if real in above:
        msg = f"cannot stage {path}: it leads to itself"
        raise StagingError(msg, hint="remove the link")
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        # A device may never end, and a pipe may never begin.
        msg = f"cannot stage {path}: it is neither a file nor a directory"
        raise StagingError(msg, hint="stage files that have an end")
    yield path, target
    for one in inside:
        yield from _below(one, target / one.name, (*above, real))


def _copy(source: Path, target: Path) -> None:
    # Not with the source's rights: what may not be written to could not be removed.
    if source.is_dir():
        target.mkdir(mode=0o700)
    else:
        shutil.copyfile(source, target)
        shutil.copystat(source, target)


def _remove_earlier(directory: Path) -> None:
    """Remove what starts of this job left here that nobody let tidy up."""
    stem, _, number = directory.parent.name.rpartition(".")
    for earlier in range(int(number) if number.isdecimal() else 0):
        place = directory.parent.with_name(f"{stem}.{earlier}")
        shutil.rmtree(place / directory.name, ignore_errors=True)
        with suppress(OSError):
            place.rmdir()


def _make(directory: Path) -> None:
    """Make a directory that is this user's alone."""
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.is_symlink() or directory.parent.lstat().st_uid != os.geteuid():
            msg = f"{directory.parent} is not yours"
            raise StagingError(msg, hint="stage to a directory of your own: --stage-dir DIR")
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
    except OSError as error:
        msg = f"cannot make {directory}: {error.strerror}"
        raise StagingError(msg, hint="name a directory on the nodes' disks: --stage-dir") from error
