"""What a job does on each of its nodes before its ranks start: a check, and copies of files.

The check looks at the GPUs, the view of the run and the free space, because a fault that is found
later costs hours. The last task of a node removes the copies.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from hpc_toolkit import __version__
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.slurm.render import USERS
from hpc_toolkit.system.gpus import ask_driver
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.ranks import host_name

_GRANTED = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_NO_DEVICE = ("", "-1", "NoDevFiles")
_FREE_FILES = 1000
_SPARE_BYTES = 64 << 20
"""Space to leave free: a completely full disk breaks more than this job."""


def check_node(run: Path | None, *, gpus: int, free_bytes: int) -> tuple[bool, str]:
    """Whether this node is fit for a job, and a line about it for the log.

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
    said = "; ".join(problems) or f"ready: {', '.join(facts)}"
    return not problems, f"{host_name()}: {said}"


def usable_gpus(environ: Mapping[str, str]) -> int:
    """Count the GPUs that Slurm grants in ``environ`` and that answer NVIDIA's driver.

    Without NVIDIA's library only the grant counts. It alone counts for MIG partitions too
    (``MIG-...``), because the library counts complete GPUs. 0 if there is no sign of a GPU.
    """
    listed = next((environ[name] for name in _GRANTED if name in environ), None)
    granted = None
    if listed is not None:
        # Up to the first invalid word, as CUDA reads it; Slurm and sites write NoDevFiles or -1.
        words = (word.strip() for word in listed.rstrip(",").split(","))
        granted = list(takewhile(lambda word: word not in _NO_DEVICE, words))
    if granted is not None and any(word.startswith("MIG-") for word in granted):
        return len(granted)
    counts = [] if granted is None else [len(granted)]
    if (told := ask_driver()) is not None:
        counts.append(sum("error" not in gpu for gpu in told.get("gpus", ())))
    return min(counts, default=0)


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


class StagingError(HpcToolkitError):
    """A path or an environment cannot be copied to this node's disk."""


def stage_paths(
    paths: Sequence[Path],
    directory: Path,
    *,
    users: int,
    more: Callable[[Path], str] | None = None,
) -> str:
    """Create ``directory``, copy each path into it and return a line for the log.

    Links are replaced by copies of their targets. ``.users`` gets one entry per task, 0 to
    ``users`` - 1. A task that is done removes its entry; the task that can then remove ``.users``
    also removes the copies. Copies of earlier starts of the job on this node are removed first:
    the names of their parent directories end in a lower number. Nothing is synced, because the
    copies are temporary. ``more`` copies something else into it and returns its part of the line.

    Raises StagingError: a path is missing, links to itself or is neither a file nor a directory, or
    the disk has too little space.
    """
    started = time.monotonic()
    files = [pair for path in paths for pair in _below(path, Path(path.name), ())]
    size = sum(source.stat().st_size for source, _ in files if source.is_file())
    _remove_earlier(directory)
    _make(directory)
    said = []
    try:
        check_room(size, directory)
        for source, target in files:
            _copy(source, directory / target)
        if paths:
            took_s = time.monotonic() - started
            names = ", ".join(path.name for path in paths)
            said = [f"staged {names}: {format_size(size)} in {took_s:.1f} s"]
        said += [more(directory)] if more else []
        (directory / USERS).mkdir()
        for user in range(users):
            (directory / USERS / str(user)).mkdir()
    except BaseException as error:
        # Also after SIGTERM: no other process of a cancelled job removes the copies.
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):
            directory.parent.rmdir()
        if not isinstance(error, OSError):
            raise
        msg = f"cannot copy to {directory}: {error.strerror or error}: {error.filename}"
        hint = "check that it is readable and the disk is writable"
        raise StagingError(msg, hint=hint) from error
    return "; ".join(said)


def check_room(size: int, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if size + _SPARE_BYTES > free:
        msg = f"{format_size(size)} do not fit into {format_size(free)} at {directory}"
        raise StagingError(msg, hint="stage less, or choose a larger disk: --stage-dir DIR")


def _below(path: Path, target: Path, above: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """Yield (source, target) of ``path`` and of all files below it, directories first."""
    try:
        real = os.path.realpath(path, strict=True)
        mode = path.stat().st_mode
        inside = sorted(path.iterdir()) if stat.S_ISDIR(mode) else []
    except OSError as error:
        msg = f"cannot stage {path}: {error.strerror}"
        raise StagingError(msg, hint="check that it exists on every node") from error
    if real in above:
        msg = f"cannot stage {path}: the link points to itself"
        raise StagingError(msg, hint="remove the link")
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        # Reading a device may never end, and reading a pipe may never begin.
        msg = f"cannot stage {path}: it is neither a file nor a directory"
        raise StagingError(msg, hint="only files and directories can be staged")
    yield path, target
    for one in inside:
        yield from _below(one, target / one.name, (*above, real))


def _copy(source: Path, target: Path) -> None:
    # Not with the source's mode: the contents of a read-only directory could not be removed.
    if source.is_dir():
        target.mkdir(mode=0o700)
    else:
        shutil.copyfile(source, target)
        shutil.copystat(source, target)


def _remove_earlier(directory: Path) -> None:
    stem, _, number = directory.parent.name.rpartition(".")
    for earlier in range(int(number) if number.isdecimal() else 0):
        place = directory.parent.with_name(f"{stem}.{earlier}")
        shutil.rmtree(place / directory.name, ignore_errors=True)
        with suppress(OSError):
            place.rmdir()


def _make(directory: Path) -> None:
    """Create a directory that only this user can access."""
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.is_symlink() or directory.parent.lstat().st_uid != os.geteuid():
            msg = f"{directory.parent} belongs to another user"
            raise StagingError(msg, hint="choose your own directory: --stage-dir DIR")
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
    except OSError as error:
        msg = f"cannot make {directory}: {error.strerror}"
        raise StagingError(msg, hint="name a directory on the nodes' disks: --stage-dir") from error
