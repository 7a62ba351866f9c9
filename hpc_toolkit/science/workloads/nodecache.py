"""Copy checkpoints to a local disk, so that each node reads them once from the shared filesystem.

HPCTK_NODE_CACHE names a directory on a disk of this node, such as ``$SLURM_TMPDIR``; without it,
nothing is copied. HPCTK_NODE_CACHE_SIZE limits the size of the copies ("200G"); without it, a tenth
of the disk is left free.

The cache only creates and deletes files in one directory below it, "hpctk-checkpoints-1", whose
file CACHEDIR.TAG marks it as a cache; see `NodeCopies`. It relies on locks, so a filesystem that is
not known to be local is rejected.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads.checkpointfiles import checkpoint_files
from hpc_toolkit.science.workloads.nodecopies import NodeCopies, is_name_of_ours
from hpc_toolkit.system.quantities import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_HOME = "hpctk-checkpoints-1"
_MARKER = "CACHEDIR.TAG"
_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n# Copies of checkpoints (hpctk).\n"


@contextmanager
def local_copy(directory: Path) -> Iterator[Path]:
    """Yield a copy of a checkpoint on a disk of this node, which is kept until the context exits.

    Yield ``directory`` itself if no cache is named or the files are local already. Also do so, with
    one warning, if the cache cannot be used or the copy cannot be made: this costs time, never a
    result. Of several processes at the same time, one copies and the others wait.

    Raises:
        PermanentError: the checkpoint's index of weights is damaged.
    """
    with contextlib.ExitStack() as stack:
        try:
            copy = _copied(directory, stack)
        except ConfigError as error:
            _warn(f"{error}: checkpoints are read from where they are")
            copy = None
        except OSError as error:
            _warn(f"{directory} is not copied to this node: {error}")
            copy = None
        yield copy or directory


def _copied(directory: Path, stack: contextlib.ExitStack) -> Path | None:
    root = os.environ.get("HPCTK_NODE_CACHE")
    if not root:
        return None
    listed = checkpoint_files(directory)
    if all(files.is_local(directory / one.name) for one in listed):  # links may lead elsewhere
        return None
    size = os.environ.get("HPCTK_NODE_CACHE_SIZE")
    limit = parse_size(size, where="HPCTK_NODE_CACHE_SIZE") if size else None
    try:
        home = _home_below(Path(root))
    except OSError as error:
        msg = f"HPCTK_NODE_CACHE: {root} cannot be used: {error.strerror}"
        raise ConfigError(msg) from error
    return NodeCopies(home, limit).pinned_copy(directory, listed, stack)


@functools.lru_cache(maxsize=256)
def _warn(message: str) -> None:
    logging.getLogger(__name__).warning("%s", message)


def _home_below(root: Path) -> Path:
    """Return the directory of all copies; create it if it does not exist.

    Raises:
        ConfigError: ``root`` is not absolute or not known to be on a local filesystem, other users
            can write there (and so replace the files that are loaded), or the name is in use.
        OSError: the directory cannot be created.
    """
    if not root.is_absolute():
        msg = f"HPCTK_NODE_CACHE: '{root}' is not an absolute path"
        raise ConfigError(msg, hint="a variable in it may be unset, or was never replaced")
    home = root / _HOME
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(root, root.stat(), stat.S_IWOTH)
    if not files.is_local(root):
        msg = f"HPCTK_NODE_CACHE: {root} is on {files.filesystem_of(root)}, not a local disk"
        raise ConfigError(msg, hint="name a directory on this node, such as $SLURM_TMPDIR")
    home.mkdir(mode=0o700, exist_ok=True)
    _require_private(home, home.lstat(), stat.S_IWOTH | stat.S_IWGRP)
    names = os.listdir(home)
    if _MARKER not in names:
        # A cleaner of temporary files deletes the marker first, because only copies are touched.
        if not all(map(is_name_of_ours, names)):
            msg = f"HPCTK_NODE_CACHE: {home} has no {_MARKER}, so what is in it is not a cache's"
            raise ConfigError(msg, hint="name another directory")
        (home / _MARKER).write_bytes(_SIGNATURE)
    return home


def _require_private(path: Path, status: os.stat_result, forbidden: int) -> None:
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not ours or status.st_mode & forbidden:
        msg = f"HPCTK_NODE_CACHE: {path} is not a directory that you alone own and write to"
        raise ConfigError(msg, hint="name a directory of your own")
