"""The area of an examination: a directory that it creates in the examined one and removes."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.rundir import files
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = ".hpctk-doctor-"
_ABANDONED_S = 3600.0
_TRIES = 5


def make_area(root: Path, token: str, side: str) -> Path:
    """Create the area, or use the one that the other side created; either side may be first.

    Args:
        root: the examined directory, by this side's path.
        token: identifies this examination.
        side: name of this side.

    Raises:
        OSError: this side cannot write to the directory.
    """
    area = root / f"{_PREFIX}{token}"
    with suppress(FileExistsError):
        area.mkdir()
    owner = {"host": host_name(), "boot": boot_id(), "pid": os.getpid()}
    record = {**owner, "ticks": process_ticks(os.getpid())}
    mine = area / f"owner-{side}"
    try:
        files.write_in_place(mine, json.dumps(record).encode())
    except OSError:
        # A full disk may have room for the directory but not for the file.
        with suppress(OSError):
            mine.unlink(missing_ok=True)
            area.rmdir()
        raise
    return area


def remove_area(area: Path) -> bool:
    """Remove the area with its contents; return whether it is gone."""
    for _ in range(_TRIES):
        shutil.rmtree(area, ignore_errors=True)
        if not area.exists():
            return True
        # NFS renames a removed file that a process has open (.nfs...).
        time.sleep(0.1)
    return False


def sweep(root: Path, own: Path) -> list[str]:
    """Remove the areas of killed examinations and return their names.

    An area of this host is abandoned when its process is gone. Processes of other hosts cannot be
    checked; their areas are kept for an hour, by the filesystem's timestamps.
    """
    swept = []
    for name in files.list_names(root):
        area = root / name
        if name.startswith(_PREFIX) and area != own and _is_abandoned(area, own):
            remove_area(area)
            swept.append(name)
    return swept


def _is_abandoned(area: Path, own: Path) -> bool:
    with suppress(OSError):
        if own.stat().st_mtime - area.stat().st_mtime > _ABANDONED_S:
            return True
    for path in area.glob("owner-*"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            owner = json.loads(files.read_fresh(path))
            here = (owner["host"], owner["boot"]) == (host_name(), boot_id())
            if here and process_ticks(owner["pid"]) != owner["ticks"]:
                return True
    return False
