"""Carry out repairs one by one; each checks again that it is still needed and safe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.run.planning import LEFT_ALONE_S
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hpc_toolkit.doctor.run.planning import Repair

_NOW = "somebody did it meanwhile"


def repair_run(root: Path, repairs: Iterable[Repair]) -> Iterator[tuple[str, str]]:
    """Carry out planned repairs; yield (name, problem) for each file, with "" for success.

    A repair that fails is reported, and the others are still carried out.
    """
    for repair in repairs:
        directory = (root / repair.names[0]).parent
        if repair.kind == "claim" and not directory.is_dir():
            # Each of thousands of claims would report the same.
            yield repair.some, f"left: {directory.relative_to(root)} could not be made"
            continue
        for name, owner in zip(repair.names, repair.owners or repair.names, strict=True):
            try:
                yield name, _repair(root, repair, name, owner)
            except OSError as error:
                yield name, f"failed: {error.strerror or error}"


def _repair(root: Path, repair: Repair, name: str, owner: str) -> str:
    path = root / name
    if repair.kind == "directory":
        return _make(path)
    if repair.kind == "claim":
        found = files.create_name(path, owner)
        return "" if found == owner else f"{found} has it meanwhile"
    return _move_aside(path, RunPaths(root).repaired / name)


def _make(directory: Path) -> str:
    try:
        directory.mkdir()
    except FileExistsError:
        if not directory.is_dir():
            raise
        return _NOW
    files.sync_directory(directory.parent)
    return ""


def _move_aside(path: Path, to: Path) -> str:
    """Move an unused file to ``repaired/``; another repair may move it at the same time."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        if _time_of(to.parent) - path.stat().st_mtime < LEFT_ALONE_S:
            return "left: changed within the last hour"
        files.move_file(path, to)
    except (FileNotFoundError, FileExistsError):
        if path.exists() or not to.exists():
            raise
        return _NOW
    return ""


def _time_of(directory: Path) -> float:
    """Return the filesystem's time for a new file: clocks of two hosts are never compared."""
    made = directory / f".now-{os.urandom(4).hex()}"
    made.touch()
    try:
        return made.stat().st_mtime
    finally:
        made.unlink()
