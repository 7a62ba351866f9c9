"""Files of a run in memory, as one process sees them, behind the real code's own calls.

A :class:`Disk` has two layers: ``image`` is what the process sees, which may be old; ``world`` is
what the server holds. Reading asks the image; an exclusive name asks the world, as every network
filesystem does, and its answer shows the name.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from hpc_toolkit.queue import control, items, leases, log, units
from hpc_toolkit.results import gather
from hpc_toolkit.rundir import files, journal, layout, trust
from hpc_toolkit.worker import attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Content = bytes | str
"""A file, or the target of a symlink."""

ROOT = "/run"
_disks: list[Disk] = []


class Disk:
    """Stands in for the module ``os`` in the modules that touch files of a run."""

    path = SimpleNamespace(abspath=os.path.abspath)
    """For :func:`files.share`, in a process whose earlier tests opened runs on disk."""

    def __init__(
        self,
        image: dict[str, Content],
        world: dict[str, Content],
        *,
        name: str,
        reply: Callable[[str], str] = lambda _call: "",
        lost: list[str] | None = None,
    ) -> None:
        self.image = image
        self.world = world
        self.changed: dict[str, Content] = {}
        """What was created or written, but for appended journals."""
        self.synced = True
        """Whether nothing that was appended still waits for its ``fdatasync``."""
        self.lost = lost if lost is not None else []
        """Replies to the creation of a name that were lost."""
        self.free_locks: set[str] = set()
        """Workers whose lock is found free."""
        self._name = name
        self._reply = reply
        self._fds: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("O_", "SEEK_", "strerror", "getpid", "environ")):
            raise AttributeError(name)
        return getattr(os, name)

    def urandom(self, count: int) -> bytes:
        """Names of payloads: the same whenever the same process does the same."""
        made = sum("/log/" in key or "/control/" in key for key in self.world)
        return f"{self._name}-{made}".encode()[-count:].rjust(count, b"-")

    def open(self, path: object, flags: int, _mode: int = 0) -> int:
        key = str(path)
        if not flags & os.O_DIRECTORY:
            if flags & os.O_EXCL and key in self.world:
                raise _error(errno.EEXIST, key)
            if flags & os.O_CREAT:
                if key not in self.image:
                    self._put(key, b"")
            elif key not in self.image:
                raise _error(errno.ENOENT, key)
        fd = 1000 + len(self._fds)
        self._fds[fd] = [key, 0]
        return fd

    def close(self, fd: int) -> None:
        self._fds[fd] = []

    def _bytes(self, fd: int) -> bytes:
        found = self.image[self._fds[fd][0]]
        assert isinstance(found, bytes)
        return found

    def read(self, fd: int, size: int) -> bytes:
        data = self._bytes(fd)[self._fds[fd][1] :][:size]
        self._fds[fd][1] += len(data)
        return data

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        return self._bytes(fd)[offset : offset + size]

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """Append."""
        key = self._fds[fd][0]
        self._put(key, self._bytes(fd) + bytes(data))
        self.synced = False
        return len(data)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        old = self._bytes(fd)
        filled = old[:offset].ljust(offset, b"\0")
        self._put(self._fds[fd][0], filled + bytes(data) + old[offset + len(data) :])
        return len(data)

    def fsync(self, _fd: int) -> None:
        pass

    def fdatasync(self, _fd: int) -> None:
        self.synced = True

    def _put(self, key: str, content: Content) -> None:
        self.image[key] = self.world[key] = self.changed[key] = content

    def symlink(self, target: str, path: object) -> None:
        self._create("symlink", target, str(path))

    def link(self, source: object, path: object, *, follow_symlinks: bool) -> None:
        """Give a symlink another name."""
        assert not follow_symlinks
        target = self.world.get(str(source))
        if not isinstance(target, str):
            raise _error(errno.ENOENT, str(source))
        self._create("link", target, str(path))

    def _create(self, call: str, target: str, key: str) -> None:
        if key in self.world:
            self.image[key] = self.world[key]
            raise _error(errno.EEXIST, key)
        how = self._reply(call)
        if how == "refused":  # it has as many names as it may have
            raise _error(errno.EMLINK, key)
        self._put(key, target)
        if how == "repeated":  # the first reply was lost, and the client asked again
            raise _error(errno.EEXIST, key)
        if how == "lost":
            raise _error(errno.EIO, key)
        if how == "hidden":
            del self.image[key]
            raise _error(errno.EIO, key)

    def readlink(self, path: object) -> str:
        found = self.image.get(str(path))
        if not isinstance(found, str):
            raise _error(errno.ENOENT, str(path))
        return found

    def listdir(self, path: object) -> list[str]:
        start = f"{path}/"
        return [key[len(start) :] for key in self.image if key.startswith(start)]


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class _Opened(io.BytesIO):
    """A file that is open for reading, and has a descriptor where one is asked for."""

    def __init__(self, path: MemoryPath) -> None:
        super().__init__(path.read_bytes())
        self._path = path

    def fileno(self) -> int:
        return _disks[-1].open(self._path, os.O_RDONLY)


class MemoryPath(PurePosixPath):
    """A path on the disk at hand, with what the package asks of a path."""

    _known: ClassVar[dict[tuple[str, str], MemoryPath]] = {}

    def __truediv__(self, name: str) -> MemoryPath:  # type: ignore[override]
        key = (str(self), name)
        if key not in self._known:
            self._known[key] = super().__truediv__(name)
        return self._known[key]

    def _content(self) -> Content:
        found = _disks[-1].image.get(str(self))
        if found is None:
            raise _error(errno.ENOENT, str(self))
        return found

    def readlink(self) -> PurePosixPath:
        return PurePosixPath(_disks[-1].readlink(self))

    def read_bytes(self) -> bytes:
        found = self._content()
        assert isinstance(found, bytes)
        return found

    def open(self, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return _Opened(self)

    def stat(self) -> SimpleNamespace:
        if str(self) == f"{ROOT}/workers":
            return SimpleNamespace(st_dev=1)
        return SimpleNamespace(st_size=len(self._content()))

    def exists(self) -> bool:
        return str(self) in _disks[-1].image

    def is_symlink(self) -> bool:
        return isinstance(_disks[-1].image.get(str(self)), str)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Only the payload of an entry that was not created is ever deleted."""
        assert missing_ok
        for layer in (_disks[-1].image, _disks[-1].world, _disks[-1].changed):
            layer.pop(str(self), None)

    def replace(self, target: MemoryPath) -> None:
        """Rename over what may be there."""
        content = self._content()
        self.unlink(missing_ok=True)
        _disks[-1]._put(str(target), content)

    def glob(self, pattern: str) -> Iterator[MemoryPath]:
        end = pattern.removeprefix("*")
        return (self / name for name in _disks[-1].listdir(self) if name.endswith(end))


def run_paths() -> layout.RunPaths:
    """The paths of the run on whatever disk is at hand."""
    return layout.RunPaths(cast("Path", MemoryPath(ROOT)))


@contextmanager
def mounted(disk: Disk) -> Iterator[Disk]:
    """Have the package see this disk."""
    _disks.append(disk)
    try:
        yield disk
    finally:
        _disks.pop()


class _Os:
    """The module ``os`` of the disk at hand."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_disks[-1] if _disks else os, name)


@contextmanager
def memory_instead_of_files() -> Iterator[None]:
    """Turn the package's file calls to the disk at hand, and its executor's clock off."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (files, gather, journal, layout, control, items, log, units):
            if hasattr(module, "os"):
                patch.setattr(module, "os", _Os())
        still = SimpleNamespace(time=lambda: 0.0, monotonic=lambda: 0.0)
        patch.setattr(trust, "is_local", lambda _path: True)  # directories have no times here
        patch.setattr(attempts, "time", still)
        patch.setattr(attempts.Log, "settle", lambda _self: 0)
        patch.setattr(attempts.Log, "reopen", lambda _self: 0)
        free = lambda _paths, worker: worker in _disks[-1].free_locks  # noqa: E731
        patch.setattr(leases, "lock_is_free", free)
        yield
