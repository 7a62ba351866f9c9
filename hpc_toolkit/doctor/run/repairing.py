"""Carry out repairs one by one; each checks again that it is still needed and safe."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.run.planning import LEFT_ALONE_S, head_is_wrong, present_workers, targets
from hpc_toolkit.queue.log import StageLog
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
    paths = RunPaths(root)
    unmade: set[str] = set()
    for repair in repairs:
        if repair.kind == "claim" and unmade.intersection(_directories(repair)):
            # Each of thousands of claims would report the same.
            yield repair.some, f"left: {', '.join(_directories(repair))} could not be made"
            continue
        absence = _Absence(paths)
        for name, owner in zip(repair.names, repair.owners or repair.names, strict=True):
            try:
                yield name, _repair(paths, repair, name, owner, absence)
            except OSError as error:
                unmade.add(name)
                yield name, f"failed: {error.strerror or error}"


def _directories(repair: Repair) -> list[str]:
    return sorted({os.path.dirname(name) for name in repair.names})


class _Absence:
    """The check that no worker is active on a run; repeated if one may have joined since."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._seen: int | None = None
        self._present: list[str] = []
        self.now_s = 0.0
        """The filesystem's time of the last check."""

    def present(self, beside: Path) -> list[str]:
        """Return workers that may be alive; ``beside``, a directory of the run, gives the time."""
        try:
            # A new worker changes this mtime, so the files are not read again for every move.
            changed = self._paths.workers.stat().st_mtime_ns
        except OSError:
            changed = None
        if self._seen is None or changed != self._seen:
            self._seen = changed
            self.now_s = _time_of(beside)
            self._present = present_workers(self._paths, self.now_s)
        return self._present


def _repair(paths: RunPaths, repair: Repair, name: str, owner: str, absence: _Absence) -> str:
    path = paths.root / name
    if repair.kind == "directory":
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            return _NOW
        files.sync_directory(path.parent)
        return ""
    if repair.kind == "claim":
        found = files.create_name(path, owner)
        return "" if found == owner else f"{found} has it meanwhile"
    if repair.kind == "head":
        return _write_head(paths, repair.stage)
    if repair.kind == "back":
        return _move(paths.repaired / name, path)
    return _move_aside(paths, repair.stage, path, absence)


def _write_head(paths: RunPaths, stage: str) -> str:
    log = StageLog(paths.stage(stage))
    log.poll()
    written = 0
    # A process that adds an entry meanwhile writes head too, and the higher number must win.
    while written != log.length:
        written = log.length
        # O_NOFOLLOW: if somebody put a link in its place, another file would be truncated.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        os.close(os.open(log.paths.head, flags, 0o666))
        log.show(written)
        log.poll()
    return "failed: it is damaged again" if head_is_wrong(log) else ""


def _move_aside(paths: RunPaths, stage: str, path: Path, absence: _Absence) -> str:
    """Move an unused file to ``repaired/``; move it back if an entry names it by then."""
    to = paths.repaired / path.relative_to(paths.root)
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.exists() and not path.exists():
        return _NOW
    if present := absence.present(to.parent):
        return f"left: {present[0]} may be alive"
    if absence.now_s - path.stat().st_mtime < LEFT_ALONE_S:
        return "left: changed within the last hour"
    if _move(path, to):
        return _NOW
    named = targets(paths.stage(stage)) if stage else set()
    if f"{path.parent.name}/{path.name}" in named:
        files.move_file(to, path)
        return "left: an entry names it now"
    return ""


def _move(path: Path, to: Path) -> str:
    """Move a file; another repair may move it at the same time."""
    try:
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
