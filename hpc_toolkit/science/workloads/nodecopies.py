"""Copies of checkpoints on a local disk: made once, pinned while read, deleted oldest first."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.rundir import files
from hpc_toolkit.science.workloads.checkpointfiles import checkpoint_files

if TYPE_CHECKING:
    from collections.abc import Sequence

    from filelock import AcquireReturnProxy, BaseFileLock

    from hpc_toolkit.science.workloads.checkpointfiles import CheckpointFile

_NAME = re.compile(r"\.?([0-9a-f]{32})-([0-9]+)")
_LOCK = re.compile(r"lock|[0-9a-f]{32}(\.[0-9a-f]{16}\.pin|\.lock)")
_CHUNK = 2**24
_LEFT_FREE = 0.1  # of the disk, where no limit is given
_PATIENCE_S = 60.0


def is_name_of_ours(name: str) -> bool:
    """Whether it has one of the forms that `NodeCopies` gives."""
    return any(form.fullmatch(name) for form in (_NAME, _LOCK))


@dataclass(frozen=True, slots=True)
class _Entry:
    """A copy that is there or is being made."""

    path: Path
    key: str
    size: int

    @property
    def half_made(self) -> bool:
        return self.path.name.startswith(".")

    def age(self) -> tuple[bool, int]:
        """Smallest for what is deleted first: half-made ones, then those used longest ago."""
        try:
            return not self.half_made, self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False, 0


class NodeCopies:
    """Copies of checkpoints in one directory of a local disk, which holds nothing else.

    ::

        <key>-<bytes>   a whole copy; the key hashes where its files are, how large and how old
        .<key>-<bytes>  one that is being made; it counts with all its bytes from the beginning
        <key>.lock      held by who makes it, so that the others wait and read it from here
        <key>.<n>.pin   held by a process that reads it
        lock            held for a moment, to look, to pin, to make room and to name a copy

    The locks are filelock's. Who is killed leaves no lock, only files that the next one clears
    away. Nothing else is ever deleted than what has a name of these forms.
    """

    def __init__(self, home: Path, limit: int | None = None) -> None:
        """``limit`` is what the copies may take together, in bytes, as far as the disk has room;
        without it, a tenth of the disk is left free.
        """
        self._home = home
        self._limit = limit

    def pinned_copy(
        self, directory: Path, listed: Sequence[CheckpointFile], stack: contextlib.ExitStack
    ) -> Path | None:
        """A copy of the files ``listed``, not deleted until ``stack`` closes; None where they were
        written meanwhile, or where others read a copy that lacks some.

        Raises:
            OSError: there is no room, it cannot be made, or who makes it does not get on.
        """
        key = hashlib.sha256(repr((str(directory.resolve()), listed)).encode()).hexdigest()[:32]
        size = sum(one.size for one in listed)
        copy = self._home / f"{key}-{size}"
        aside = self._home / f".{key}-{size}"
        with self._turn(key, aside):
            with self._lock("lock"):
                shutil.rmtree(aside, ignore_errors=True)  # of one who was killed
                if _holds(copy, listed):
                    os.utime(copy)  # used last
                    stack.callback(self._unpin, self._pin(key))
                    return copy
                if self._is_read(key):
                    return None
                # One that lacks files was deleted in part, such as by a cleaner of temporary files.
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
        """Delete what nobody makes or reads until ``size`` more fits: half-made copies first, and
        then those used longest ago. Where all of it would not do, nothing is deleted.
        """
        entries = self._entries()
        room = self._room(entries)
        doomed = []
        for entry in sorted(entries, key=_Entry.age):
            if room >= size:
                break
            # Nobody begins to make or read one until 'lock' is free again.
            if not self._is_made(entry.key) and not self._is_read(entry.key):
                doomed.append(entry)
                room += entry.size
        if room < size:
            return False
        for entry in doomed:
            shutil.rmtree(entry.path, ignore_errors=True)
        return not doomed or self._room(self._entries()) >= size

    def _entries(self) -> list[_Entry]:
        named = ((path, _NAME.fullmatch(path.name)) for path in self._home.iterdir())
        return [_Entry(path, found[1], int(found[2])) for path, found in named if found]

    def _room(self, entries: list[_Entry]) -> float:
        """Bytes that one more copy may take now."""
        disk = shutil.disk_usage(self._home)
        coming = sum(max(0, one.size - _written(one.path)) for one in entries if one.half_made)
        if self._limit is None:
            return disk.free - coming - _LEFT_FREE * disk.total
        taken = sum(entry.size for entry in entries)
        return min(self._limit - taken, disk.free - coming)

    def _turn(self, key: str, aside: Path) -> AcquireReturnProxy[BaseFileLock]:
        """The lock of a copy, held, as soon as whoever makes it is done.

        Raises:
            Timeout: they stand still, such as in a job that is suspended.
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

    def _is_made(self, key: str) -> bool:
        return self._is_held(f"{key}.lock")

    def _is_read(self, key: str) -> bool:
        """Whether a process reads the copy; the pins of those that are gone are deleted."""
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
    """Copy the files; False where they were written meanwhile, and may be a mix."""
    for one in listed:
        target = aside / one.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with (directory / one.name).open("rb") as source:
            files.write_new(target, iter(lambda: source.read(_CHUNK), b""))
    # Whoever loads them says what of them is not whole.
    return _holds(aside, listed) and checkpoint_files(directory) == listed


def _holds(copy: Path, listed: Sequence[CheckpointFile]) -> bool:
    try:
        return all((copy / one.name).stat().st_size == one.size for one in listed)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _written(directory: Path) -> int:
    """Bytes of the files in a directory that others may be writing, naming or deleting."""
    total = 0
    for top, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(top, name)).st_size
    return total
