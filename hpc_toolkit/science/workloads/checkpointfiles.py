"""The files of a checkpoint that loading reads, and copies of them on a local disk of a node.

A trainer also leaves its optimizer, its random state and often a second copy of the weights there:
three to four times the size of what loading reads, which :func:`checkpoint_files` lists.

With a copy, each node reads a checkpoint once from the shared filesystem. HPCTK_NODE_CACHE names a
directory on a disk of this node, such as ``$SLURM_TMPDIR``; without it, nothing is copied.
HPCTK_NODE_CACHE_SIZE limits the size of the copies ("200G"); without it, a tenth of the disk is
left free. Files are only created and deleted in a directory below it; see `NodeCopies`. The cache
relies on locks, so a filesystem that is not known to be local is rejected.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import ConfigError, PermanentError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.quantities import parse_size

if TYPE_CHECKING:
    from filelock import AcquireReturnProxy, BaseFileLock


SETTINGS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.tiktoken",
    "*.codes",
    "*.spm",
    "*.tokenizer",
)
"""Files of the configuration and of any kind of tokenizer."""

WEIGHTS, PICKLED_WEIGHTS = ("*.safetensors",), ("pytorch_model*.bin",)
"""Weights on the hub, and of a revision without them the pickled ones."""

# In transformers' order: it loads the first file that exists, whatever other files there are.
_WHOLE_OR_INDEX = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, slots=True, order=True)
class CheckpointFile:
    """A file that a model or its tokenizer is loaded from."""

    name: str
    """Path relative to the checkpoint's directory; has slashes if an index names shards so."""
    size: int
    """Bytes; for a link, the bytes of its target, as in the hub's cache."""
    changed_ns: int
    """Time of the last write in ns, by the clock of its filesystem."""


def checkpoint_files(directory: Path) -> list[CheckpointFile]:
    """Return the files that loading a checkpoint reads, sorted by name.

    These are the settings, the tokenizer, and the set of weights that transformers chooses; nothing
    else in the directory, and only regular files. Reads the index of sharded weights, but none of
    the other files. Raises PermanentError: an index of weights is damaged, or leads out of the
    directory. Raises OSError: weights are missing, or the directory cannot be read.
    """
    settings = {
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".")
        and any(fnmatchcase(path.name, pattern) for pattern in SETTINGS)
        and path.is_file()
    }
    found = []
    for name in sorted(settings.union(weight_names(directory))):
        status = (directory / name).stat()
        found.append(CheckpointFile(name, status.st_size, status.st_mtime_ns))
    return found


def weight_names(directory: Path) -> list[str]:
    """Return the names of the weights that transformers loads, whether the files exist or not.

    Raises PermanentError: the index that names them is damaged, or leads out of the directory.
    """
    for name in _WHOLE_OR_INDEX:
        if (directory / name).is_file():
            return _shards(directory / name) if name.endswith(".json") else [name]
    return [_WHOLE_OR_INDEX[0]]


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of a checkpoint.

    Raises PermanentError: the file is missing, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PermanentError(f"{path}: missing, so this is not a checkpoint") from None
    except ValueError as error:
        raise PermanentError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise PermanentError(f"{path}: holds {type(content).__name__}, not an object")
    return content


def _shards(index: Path) -> list[str]:
    named = read_object(index).get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else []
    paths = [PurePosixPath(name) for name in names if isinstance(name, str)]
    inside = all(path.parts and not path.is_absolute() and ".." not in path.parts for path in paths)
    if not names or len(paths) < len(names) or not inside:
        raise PermanentError(f"{index}: its weight_map does not name files of this checkpoint")
    return sorted(set(names))


_NAME = re.compile(r"(\.?)([0-9a-f]{32})-([0-9]+)")
_PATIENCE_S = 60.0


class _Entry(NamedTuple):
    """A copy that is complete or being made."""

    path: Path
    key: str
    size: int
    half_made: bool


class NodeCopies:
    """Copies of checkpoints in one directory of a local disk, which contains nothing else.

    ::

        <key>-<bytes>   a complete copy; the key hashes its source, its files' sizes and times
        .<key>-<bytes>  a copy that is being made; all its bytes count from the beginning
        <key>.lock      held by the process that makes the copy, while others wait for it
        <key>.<n>.pin   held by a process that uses the copy
        lock            held briefly to check, to pin, to make room and to rename a copy

    The locks are filelock's. A killed process leaves no lock held, only files that the next process
    removes. Only files with names of these forms are ever deleted.
    """

    def __init__(self, home: Path, limit: int | None = None) -> None:
        """``limit`` is the total size of the copies in bytes, as far as the disk has room."""
        self._home = home
        self._limit = limit

    def pinned_copy(
        self, directory: Path, listed: Sequence[CheckpointFile], stack: contextlib.ExitStack
    ) -> Path | None:
        """Return a copy of the files ``listed``, which is not deleted until ``stack`` closes.

        None if the files were written meanwhile, or if others use a copy that lacks some of them.
        Raises OSError: there is no room, the copy cannot be made, or its maker makes no progress.
        """
        key = hashlib.sha256(repr((str(directory.resolve()), listed)).encode()).hexdigest()[:32]
        size = sum(one.size for one in listed)
        copy = self._home / f"{key}-{size}"
        aside = self._home / f".{key}-{size}"
        with self._turn(key, aside):
            with self._lock("lock"):
                shutil.rmtree(aside, ignore_errors=True)  # left by a killed process
                if _holds(copy, listed):
                    os.utime(copy)  # mark as most recently used
                    stack.callback(self._unpin, self._pin(key))
                    return copy
                if self._is_read(key):
                    return None
                # A copy that lacks files was deleted in part, such as by a cleaner of /tmp.
                shutil.rmtree(copy, ignore_errors=True)
                if not self._make_room(size):
                    raise OSError(errno.ENOSPC, f"no room for {size} bytes beside what is in use")
                aside.mkdir()
            try:
                if not _copy(directory, listed, aside):
                    return None
                with self._lock("lock"):
                    files.publish_directory(aside, copy)
                    stack.callback(self._unpin, self._pin(key))
                return copy
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def _make_room(self, size: int) -> bool:
        """Delete copies that no process makes or uses until ``size`` more bytes fit.

        Half-made copies are deleted first, then the least recently used. If deleting all of them
        would not free enough, nothing is deleted.
        """
        entries = self._entries()
        room = self._room(entries)
        doomed = []
        for entry in sorted(entries, key=lambda one: (not one.half_made, _used_at(one.path))):
            if room >= size:
                break
            # No process can begin to make or use a copy while this process holds 'lock'.
            if not self._is_held(f"{entry.key}.lock") and not self._is_read(entry.key):
                doomed.append(entry)
                room += entry.size
        if room < size:
            return False
        for entry in doomed:
            shutil.rmtree(entry.path, ignore_errors=True)
        return not doomed or self._room(self._entries()) >= size

    def _entries(self) -> list[_Entry]:
        named = ((path, _NAME.fullmatch(path.name)) for path in self._home.iterdir())
        return [_Entry(path, it[2], int(it[3]), bool(it[1])) for path, it in named if it]

    def _room(self, entries: list[_Entry]) -> float:
        """Return how many bytes another copy may take now."""
        disk = shutil.disk_usage(self._home)
        coming = sum(max(0, one.size - _written(one.path)) for one in entries if one.half_made)
        if self._limit is None:
            return disk.free - coming - 0.1 * disk.total
        taken = sum(entry.size for entry in entries)
        return min(self._limit - taken, disk.free - coming)

    def _turn(self, key: str, aside: Path) -> AcquireReturnProxy[BaseFileLock]:
        """Acquire the lock of a copy, waiting as long as the process that makes it progresses.

        Raises Timeout: that process makes no progress, such as in a suspended job.
        """
        from filelock import Timeout

        written = -1
        while True:
            try:
                return self._lock(f"{key}.lock", timeout=_PATIENCE_S).acquire()
            except Timeout:
                before, written = written, _written(aside)
                if written <= before:
                    raise

    def _is_read(self, key: str) -> bool:
        """Return whether a process uses the copy; pins of processes that are gone are deleted."""
        alive = False
        for pin in self._home.glob(f"{key}.*.pin"):
            if self._is_held(pin.name):
                alive = True
            else:
                pin.unlink(missing_ok=True)
        return alive

    def _is_held(self, name: str) -> bool:
        from filelock import Timeout

        try:
            with self._lock(name, timeout=0):
                return False
        except Timeout:
            return True

    def _pin(self, key: str) -> BaseFileLock:
        return self._lock(f"{key}.{secrets.token_hex(8)}.pin").acquire().lock

    def _unpin(self, pin: BaseFileLock) -> None:
        pin.release()
        with contextlib.suppress(OSError):
            Path(pin.lock_file).unlink()

    def _lock(self, name: str, timeout: float = _PATIENCE_S) -> BaseFileLock:
        from filelock import FileLock

        return FileLock(self._home / name, timeout=timeout)


def _copy(directory: Path, listed: Sequence[CheckpointFile], aside: Path) -> bool:
    """Copy the files; return False if they were written meanwhile and the copy may be a mix."""
    for one in listed:
        target = aside / one.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with (directory / one.name).open("rb") as source:
            files.write_new(target, iter(lambda: source.read(2**24), b""))
    # The process that loads damaged files reports them.
    return _holds(aside, listed) and checkpoint_files(directory) == listed


def _used_at(copy: Path) -> int:
    try:
        return copy.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _holds(copy: Path, listed: Sequence[CheckpointFile]) -> bool:
    try:
        return all((copy / one.name).stat().st_size == one.size for one in listed)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _written(directory: Path) -> int:
    """Return the bytes of files in a directory that others may be writing, renaming or deleting."""
    total = 0
    for top, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(top, name)).st_size
    return total


_SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n# Copies of checkpoints (hpctk).\n"


@contextlib.contextmanager
def local_copy(directory: Path) -> Iterator[Path]:
    """Yield a copy of a checkpoint on a disk of this node, which is kept until the context exits.

    Yield ``directory`` itself if no cache is named or the files are local already. Also do so, with
    one warning, if the cache cannot be used or the copy cannot be made: this costs time, never a
    result. Of several processes at the same time, one copies and the others wait. Raises
    PermanentError: the checkpoint's index of weights is damaged.
    """
    with contextlib.ExitStack() as stack:
        copy = None
        try:
            copy = _copied(directory, stack)
        except ConfigError as error:
            _warn(f"{error}: checkpoints are read from where they are")
        except OSError as error:
            _warn(f"{directory} is not copied to this node: {error}")
        yield copy or directory


def _copied(directory: Path, stack: contextlib.ExitStack) -> Path | None:
    given = os.environ.get("HPCTK_NODE_CACHE")
    if not given:
        return None
    # A job script contains $SLURM_TMPDIR as it is, since its value differs from node to node.
    root = os.path.expandvars(given)
    listed = checkpoint_files(directory)
    if all(files.is_local(directory / one.name) for one in listed):  # links may lead elsewhere
        return None
    size = os.environ.get("HPCTK_NODE_CACHE_SIZE")
    limit = parse_size(size, where="HPCTK_NODE_CACHE_SIZE") if size else None
    try:
        home = _home_below(Path(root))
    except OSError as error:
        raise ConfigError(f"HPCTK_NODE_CACHE: {root} cannot be used: {error.strerror}") from error
    return NodeCopies(home, limit).pinned_copy(directory, listed, stack)


@functools.lru_cache(maxsize=256)
def _warn(message: str) -> None:
    logging.getLogger(__name__).warning("%s", message)


def _home_below(root: Path) -> Path:
    """Return the directory of all copies; create it if it does not exist.

    Raises ConfigError: ``root`` is not absolute or not known to be on a local filesystem, or other
    users can write there and so replace the files that are loaded. Raises OSError: the directory
    cannot be created.
    """
    if str(root).startswith("$"):
        msg = f"HPCTK_NODE_CACHE: {root.parts[0]} is not set on this node"
        raise ConfigError(msg, hint="name another directory of a local disk")
    if not root.is_absolute():
        raise ConfigError(f"HPCTK_NODE_CACHE: '{root}' is not an absolute path")
    home = root / "hpctk-checkpoints-1"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(root, root.stat(), stat.S_IWOTH)
    if not files.is_local(root):
        msg = f"HPCTK_NODE_CACHE: {root} is on {files.filesystem_of(root)}, not a local disk"
        raise ConfigError(msg, hint="name a directory on this node, such as $SLURM_TMPDIR")
    home.mkdir(mode=0o700, exist_ok=True)
    _require_private(home, home.lstat(), stat.S_IWOTH | stat.S_IWGRP)
    marker = home / "CACHEDIR.TAG"  # tells backups to leave the directory out
    if not marker.exists():
        marker.write_bytes(_SIGNATURE)
    return home


def _require_private(path: Path, status: os.stat_result, forbidden: int) -> None:
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not ours or status.st_mode & forbidden:
        msg = f"HPCTK_NODE_CACHE: {path} must be owned by you and writable only by you"
        raise ConfigError(msg, hint="choose another directory")
