"""A checkpoint is read from the shared filesystem once a node: copies of it on a local disk.

HPCTK_NODE_CACHE names a directory on a disk of this node, such as ``$SLURM_TMPDIR/checkpoints``;
without it, nothing is copied. HPCTK_NODE_CACHE_SIZE bounds it ("200G"); without it, a tenth of the
disk is left free.

What is there, below that directory::

    <key>/          a whole copy; the key is a hash of where its files are, how large and how old
    .<key>/         one that is being made
    <key>.lock      held by who makes it, so that the others wait and read it from here
    <key>.<n>.pin   held by a process that reads it
    lock            held for a moment, to look, to pin and to make room

The locks are filelock's: right on a local disk, and on no other, so one that is not known to be
local is refused. Who is killed leaves no lock, only files that the next one clears away.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit import files
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.quantities import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from filelock import BaseFileLock

_CHUNK = 2**24
_LEFT_FREE = 0.1  # of the disk, where no size is given


@contextmanager
def local_copy(directory: Path) -> Iterator[Path]:
    """The files of ``directory`` on a disk of this node, kept there while this is open.

    ``directory`` itself where no cache is named, where it is local already, and where the copy
    cannot be made: a full disk costs time, never a result. Of processes that ask at the same time,
    one copies and the others wait.

    Raises:
        ConfigError: the cache is not on a local filesystem, or its size is not one.
    """
    cache = NodeCache.of_environment()
    if cache is None or files.is_local(directory):
        yield directory
        return
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(cache.copy_of(directory)) or directory


class NodeCache:
    """Copies of directories of files in one directory of a local disk."""

    def __init__(self, root: Path, limit: int | None = None) -> None:
        """``limit`` is what the copies may take together, in bytes.

        Raises:
            ConfigError: ``root`` is not known to be on a local filesystem, or others may write
                there: what is loaded from it would be theirs.
        """
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.geteuid() or status.st_mode & stat.S_IWOTH:
            msg = f"HPCTK_NODE_CACHE: {root} belongs to another user, or anybody may write there"
            raise ConfigError(msg, hint="name a directory of your own")
        if not files.is_local(root):
            msg = f"HPCTK_NODE_CACHE: {root} is on {files.filesystem_of(root)}, not a local disk"
            raise ConfigError(msg, hint="name a directory on this node, such as $SLURM_TMPDIR/c")
        self._root = root
        self._limit = limit

    @classmethod
    def of_environment(cls) -> NodeCache | None:
        """The cache that HPCTK_NODE_CACHE names; None where it names none."""
        root = os.environ.get("HPCTK_NODE_CACHE")
        if not root:
            return None
        size = os.environ.get("HPCTK_NODE_CACHE_SIZE")
        limit = parse_size(size, where="HPCTK_NODE_CACHE_SIZE") if size else None
        return cls(Path(root), limit)

    @contextmanager
    def copy_of(self, directory: Path) -> Iterator[Path | None]:
        """A copy of ``directory``, not deleted while this is open; None where none can be made."""
        with contextlib.ExitStack() as stack:
            try:
                found = self._pinned_copy(directory, stack)
            except OSError as error:
                logging.getLogger(__name__).warning("%s is not copied: %s", directory, error)
                found = None
            yield found

    def _pinned_copy(self, directory: Path, stack: contextlib.ExitStack) -> Path | None:
        listed = _listing(directory)
        key = _key(directory, listed)
        copy = self._root / key
        aside = self._root / f".{key}"
        with self._lock(f"{key}.lock"):
            shutil.rmtree(aside, ignore_errors=True)  # of one who was killed
            with self._lock("lock"):
                stack.callback(self._unpin, self._pin(key))
                if copy.is_dir():
                    os.utime(copy)  # used last
                    return copy
                size = sum(size for _, size, _ in listed)
                if not self._make_room(size):
                    return None
            try:
                return self._made(directory, listed, aside, copy)
            finally:
                shutil.rmtree(aside, ignore_errors=True)

    def _made(
        self, directory: Path, listed: list[tuple[str, int, int]], aside: Path, copy: Path
    ) -> Path | None:
        aside.mkdir()
        for name, _, _ in listed:
            with (directory / name).open("rb") as source:
                files.write_new(aside / name, iter(lambda: source.read(_CHUNK), b""))
        if _listing(directory) != listed:
            return None  # it was written meanwhile: whoever loads it says what of it is not whole
        files.publish_directory(aside, copy)
        return copy

    def _make_room(self, size: int) -> bool:
        """Delete what nobody makes or reads until ``size`` more fits: half-made copies first, and
        then those used longest ago.
        """
        copies = sorted(
            (path for path in self._root.iterdir() if path.is_dir()),
            key=lambda path: (not path.name.startswith("."), path.stat().st_mtime_ns),
        )
        taken = {path: _size(path) for path in copies}
        for path in copies:
            if self._fits(sum(taken.values()), size):
                return True
            if self._delete(path):
                del taken[path]
        return self._fits(sum(taken.values()), size)

    def _fits(self, taken: int, size: int) -> bool:
        if self._limit is not None:
            return taken + size <= self._limit
        disk = shutil.disk_usage(self._root)
        return disk.free - size >= _LEFT_FREE * disk.total

    def _delete(self, path: Path) -> bool:
        from filelock import Timeout

        key = path.name.removeprefix(".")
        try:
            # Who makes a copy holds its lock, and takes no other key's: nobody waits in a circle.
            with self._lock(f"{key}.lock", timeout=0):
                if not all(map(self._unpin_dead, self._root.glob(f"{key}.*.pin"))):
                    return False
                shutil.rmtree(path)
        except Timeout:
            return False
        return True

    def _unpin_dead(self, pin: Path) -> bool:
        """Whether the process that pinned is gone; its pin is deleted then."""
        from filelock import Timeout

        try:
            with self._lock(pin.name, timeout=0):
                pin.unlink(missing_ok=True)
        except Timeout:
            return False
        return True

    def _pin(self, key: str) -> BaseFileLock:
        return self._lock(f"{key}.{secrets.token_hex(8)}.pin").acquire().lock

    def _unpin(self, pin: BaseFileLock) -> None:
        pin.release()
        Path(pin.lock_file).unlink(missing_ok=True)

    def _lock(self, name: str, timeout: float = -1) -> BaseFileLock:
        from filelock import FileLock

        return FileLock(self._root / name, timeout=timeout)


def _listing(directory: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file; a link's are those of what it leads to."""
    found = [path for path in directory.iterdir() if path.is_file()]
    return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found)


def _key(directory: Path, listed: list[tuple[str, int, int]]) -> str:
    return hashlib.sha256(repr((str(directory.resolve()), listed)).encode()).hexdigest()[:32]


def _size(directory: Path) -> int:
    return sum(size for _, size, _ in _listing(directory))
