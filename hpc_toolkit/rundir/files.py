"""The only place where files of a run are created, replaced, read and synced.

Every function states what a reader on another node may see in between, and what a crash leaves
behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from hpc_toolkit.errors import PASSING, RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

# Filesystems whose metadata is local to this kernel: polling them often costs nobody else anything.
_LOCAL_FILESYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"}
)

SIZES = 64
"""Sizes that a rewritten file goes through: more than rewrites fit in a tick of a server's clock
(10 ms), since each is a round trip."""

_TICKS_S = 0.02
"""More than a tick of a server's clock."""

_TRIES = 5


def create_name(path: Path, target: str, *, twin: Path | None = None) -> str:
    """Create ``path`` as a symlink whose target is its content; return the target that is there
    now.

    Exclusive and atomic with its content: of all processes on all nodes one creates the name, and
    everybody, the loser included, gets the winner's target. The caller won iff the returned target
    is its own (a target that names its creator makes a reply lost on the network harmless).

    Args:
        twin: a symlink with this target that the caller created before. The new name is then
            another one of that symlink, where the filesystem gives one: a name costs a fraction of
            what an inode costs. For filesystems of this kernel alone, since link(2) fails on others
            now and then.

    Raises:
        FileNotFoundError: the name is refused as taken, and stays invisible.
    """
    for _ in range(_TRIES):
        try:
            if twin is None or not _linked(twin, path):
                os.symlink(target, path)
        except FileExistsError:
            # GlusterFS may refuse a name to all that race for it, and take it back: nobody has it.
            with contextlib.suppress(FileNotFoundError):
                return read_name(path)
        else:
            return target
    return read_name(path)


def _linked(twin: Path, path: Path) -> bool:
    """Give a symlink another name; False where that cannot be.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(twin, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # It has as many names as the filesystem allows, or is gone, or links are refused.
        return False
    return True


def read_name(path: Path, *, tries: int = 50) -> str:
    """Return the target of a symlink that is known to exist.

    Raises:
        FileNotFoundError: it stays invisible.
    """
    import time

    for _ in range(tries):
        # GlusterFS may answer "not found", or an empty target, for a moment right after "exists".
        with contextlib.suppress(FileNotFoundError):
            if target := os.readlink(path):
                return target
        time.sleep(0.02)
    return os.readlink(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network filesystems cannot sync a directory; their metadata is synchronous.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


def show_names(path: Path) -> None:
    """Change a directory's time after names were made in it; does nothing on a local filesystem.

    NFSv3 knows a changed directory by its time alone. A client that looked between two names made
    within one tick of the server would not find the second one, not even by a listing.
    """
    import time

    if not is_local(path):
        time.sleep(_TICKS_S)
        with contextlib.suppress(OSError):  # the names are there all the same
            os.utime(path)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, going on after short writes.

    Raises:
        OSError: after which an unknown part of the data is in the file.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_new(path: Path, chunks: Iterable[bytes]) -> None:
    """Create an immutable file: whole and synced, with its name, when this returns.

    Nobody may know the name before. On an error nothing is left.

    Raises:
        FileExistsError: the name is taken.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with _synced(fd):
            for chunk in chunks:
                write_all(fd, chunk)
        sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _synced(fd: int) -> Iterator[None]:
    """Have what the block writes to a file on disk, and the file closed."""
    try:
        yield
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace a file so that a reader sees all of the old bytes or all of the new ones."""
    with _replacing(path) as fd:
        for chunk in chunks:
            write_all(fd, chunk)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Write what is too large to be held in memory; the file takes its place when the block ends.

    A reader sees all of the old bytes or all of the new ones, as with `replace_file`. A block that
    raises changes nothing; a killed one leaves a file ``.<name>.<random>.tmp``.
    """
    with _replacing(path) as fd, open(fd, "wb", closefd=False) as file:
        yield file


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """Open a file that takes the place of ``path``, whole and synced, when the block ends."""
    # A name of its own: writers that share a temporary file publish a mix of both.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with _synced(fd):
            yield fd
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish_directory(staging: Path, final: Path) -> None:
    """Give a directory that is made whole its name, which is on disk when this returns.

    Raises:
        OSError: the name belongs to a file or to a directory that is not empty; nothing is changed.
    """
    staging.rename(final)
    sync_directory(final.parent)


def move_file(path: Path, to: Path) -> None:
    """Give a file another name on the same filesystem; both changes are on disk when this returns.

    Raises:
        FileExistsError: the new name is taken.
    """
    if to.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(to))
    path.rename(to)
    for directory in {to.parent, path.parent}:
        sync_directory(directory)


def read_fresh(path: Path) -> bytes:
    """Read a small file after a fresh ``open``; b"" if it is not there.

    An ``open`` makes a network filesystem compare its copy with the server's file, by size and
    times. NFSv3 has no more than these, and a server's clock may tick every 10 ms only. So a change
    is sure to be seen if it changed the size, as `write_at` and `rewrite` do. A mount with
    ``nocto`` does not compare, and may return an old copy for as long as it caches attributes.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    finally:
        os.close(fd)


def write_at(path: Path, data: bytes, at: int) -> None:
    """Write at an offset of a small file whose size is its message; the file never shrinks.

    Of several writers the one that writes furthest wins, whatever the order. Bytes before the
    offset that nobody wrote are zeros.
    """
    fd = open_or_create(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, at)
    finally:
        os.close(fd)


def write_in_place(path: Path, data: bytes) -> None:
    """Create or `rewrite` a small file without a rename."""
    fd = open_or_create(path, os.O_WRONLY)
    try:
        rewrite(fd, data)
    finally:
        os.close(fd)


def rewrite(fd: int, data: bytes, *, sync: bool = False) -> None:
    """Replace the content of a small file by ``data`` and newlines, so that its size changes.

    For one line of a fixed length, written by one process at a time. A reader takes the first line,
    which is there at any time, and may be a mix of two rewrites: it must carry its own check.

    Raises:
        OSError: some, all or nothing of it was written.
    """
    # An fstat would have an NFS client send what was written before.
    more = os.lseek(fd, 0, os.SEEK_END) - len(data) + 1
    if more > SIZES:
        os.ftruncate(fd, len(data))
        more = 1
    os.pwrite(fd, data + b"\n" * max(0, more), 0)
    if sync:
        os.fdatasync(fd)


def open_or_create(path: Path | str, flags: int) -> int:
    """Open a file that others may create at the same moment; the descriptor.

    MooseFS tells all but one of them that the file exists, though nobody asked for O_EXCL.
    """
    try:
        return os.open(path, flags | os.O_CREAT, 0o666)
    except FileExistsError:
        return os.open(path, flags)


def list_names(path: Path) -> list[str]:
    """Names in a directory; none if the directory is not there. May be a minute old on NFS.

    Raises:
        RunError: there is a file in its place.
    """
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise misplaced(error) from error


def misplaced(error: NotADirectoryError) -> RunError:
    """What to raise where a file is in the place of a directory of a run."""
    from pathlib import Path

    named = Path(str(error.filename2 or error.filename))
    file = next((path for path in (named, *named.parents) if os.path.lexists(path)), named)
    hint = "move it away; 'hpctk doctor RUN --repair' then tells what can be made again"
    return RunError(f"{file} is not a directory", hint=hint)


def missing_directory(error: OSError) -> Path | None:
    """The directory whose absence an error tells of; None for any other error."""
    from pathlib import Path

    named = error.filename2 or error.filename
    if error.errno != errno.ENOENT or not isinstance(named, str | os.PathLike):
        return None
    directory = Path(named).parent
    return None if directory.is_dir() else directory


def is_local(path: Path) -> bool:
    """Whether the filesystem below ``path`` is known to belong to this kernel alone.

    HPCTK_FILESYSTEM says ``local`` or ``shared`` where the kernel's word misleads: a disk of this
    machine that others mount, or a test.
    """
    said = os.environ.get("HPCTK_FILESYSTEM")
    if said in {"local", "shared"}:
        return said == "local"
    return filesystem_of(path) in _LOCAL_FILESYSTEMS


def filesystem_of(path: Path) -> str:
    """The kernel's name for the type of filesystem that holds ``path``; or "unknown"."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            mount = left.split()[4].encode().decode("unicode_escape")
            inside = real == mount or real.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, right.split()[0]
    return kind


def symlink_refusal(directory: Path) -> str:
    """Why symlinks cannot be created in ``directory``; "" if they can.

    Raises:
        OSError: that cannot be told now, such as on a full disk.
    """
    probe = directory / f".probe-{os.urandom(8).hex()}"
    try:
        os.symlink("probe", probe)
        try:
            return "" if os.readlink(probe) == "probe" else "a symlink's target was changed"
        finally:
            probe.unlink()
    except OSError as error:
        if error.errno in PASSING:
            raise
        return os.strerror(error.errno or 0)
