"""Create, replace, read and sync the files of a run.

Docstrings state what a reader on another node may see in between, and what a crash leaves behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from hpc_toolkit.errors import PASSING, TRY_AGAIN, RunError, exit_code_of

SIZES = 64
"""Number of sizes that a rewritten file cycles through.

Each rewrite is a round trip, so fewer of them fit into a tick of a server's clock (10 ms).
"""

_TICKS_S = 0.02
"""Longer than a tick of a server's clock."""

_TRIES = 5
_BLOCK = 1 << 18

_granted: dict[str, int] = {}
"""Permissions of the group on the runs of this process, by absolute path with a final slash."""


def create_name(path: Path, target: str, *, twin: Path | None = None) -> str:
    """Create the symlink ``path``, whose target is its content; return the target that it has now.

    Creation is exclusive, and atomic with the content. Of all processes on all nodes, one creates
    the name, and all of them get the winner's target. The caller won iff the returned target is its
    own. If targets name their creator, a reply that is lost on the network does no harm.

    ``twin`` is a symlink with this target that the caller created before. If possible, ``path``
    becomes a hard link to it, which costs a fraction of a new inode. Use it only on filesystems of
    this kernel, because link(2) sometimes fails on others. Raises FileNotFoundError if the
    filesystem reports the name as taken, but it stays invisible.
    """
    for _ in range(_TRIES):
        try:
            if twin is None or not _linked(twin, path):
                os.symlink(target, path)
        except FileExistsError:
            # GlusterFS may refuse a name to all processes that race for it, so that none has it.
            with contextlib.suppress(FileNotFoundError):
                return read_name(path)
        else:
            return target
    return read_name(path)


def _linked(twin: Path, path: Path) -> bool:
    """Hard-link the symlink ``twin`` as ``path``; False if that is not possible.

    Raises FileExistsError if the name is taken.
    """
    try:
        os.link(twin, path, follow_symlinks=False)
    except FileExistsError:
        raise
    except OSError:
        # The twin has the maximum of links or is gone, or the filesystem refuses hard links.
        return False
    return True


def read_name(path: Path, *, tries: int = 50) -> str:
    """Return the target of a symlink that exists; FileNotFoundError if it stays invisible."""
    import time

    for _ in range(tries):
        # GlusterFS may answer "not found", or an empty target, for a moment right after "exists".
        with contextlib.suppress(FileNotFoundError):
            if target := os.readlink(path):
                return target
        time.sleep(0.02)
    return os.readlink(path)


@contextlib.contextmanager
def closing(fd: int) -> Iterator[int]:
    """Close a descriptor when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss."""
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network filesystems cannot sync a directory; their metadata is synchronous.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise


def show_names(path: Path) -> None:
    """Update a directory's time after names were created in it; for shared filesystems.

    NFSv3 clients detect a changed directory only by its time. If two names are created within one
    tick of the server's clock, a client that looked in between never finds the second name, not
    even by listing the directory.
    """
    import time

    time.sleep(_TICKS_S)
    with contextlib.suppress(OSError):  # the names exist even if this fails
        os.utime(path)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, continuing after short writes; after an OSError a part is written."""
    written = os.write(fd, data) if data else 0
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def _write_chunks(fd: int, chunks: Iterable[bytes]) -> None:
    """Write chunks in blocks: a call for each of a million lines takes seconds."""
    block: list[bytes] = []
    size = 0
    for chunk in chunks:
        block.append(chunk)
        size += len(chunk)
        if size >= _BLOCK:
            write_all(fd, b"".join(block))
            block, size = [], 0
    write_all(fd, b"".join(block))


def remove_tree(path: Path) -> None:
    """Remove a directory that this process made, as far as that is possible."""
    import shutil  # with every compression module

    shutil.rmtree(path, ignore_errors=True)


def write_new(path: Path, chunks: Iterable[bytes]) -> None:
    """Create an immutable file; its contents and its name are on disk when this returns.

    No reader may know the name before. On an error no file is left. Raises FileExistsError: the
    name is taken.
    """
    fd = shared(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), path)
    try:
        with closing(fd):
            _write_chunks(fd, chunks)
            os.fsync(fd)
        sync_directory(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, chunks: Iterable[bytes], mode: int | None = None) -> None:
    """Replace a file so that a reader sees all of the old bytes or all of the new ones.

    ``mode``: permissions of the new file; None: those that the umask leaves.
    """
    with _replacing(path) as fd:
        if mode is not None:
            os.fchmod(fd, mode)
        _write_chunks(fd, chunks)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[BinaryIO]:
    """Replace a file by data too large for memory; the new file appears when the block ends.

    As with `replace_file`, a reader sees all of the old bytes or all of the new ones. If the block
    raises, nothing changes; a killed process leaves a file ``.<name>.<random>.tmp``.
    """
    with _replacing(path) as fd, open(fd, "wb", closefd=False) as file:
        yield file


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[int]:
    """Open a temporary file that replaces ``path``, complete and synced, when the block ends."""
    # A unique name: two writers that share a temporary file would publish a mix.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        fd = shared(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), path)
        with closing(fd):
            yield fd
            os.fsync(fd)
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_directory(path: Path, *, exists: RunError) -> Iterator[Path]:
    """Create a directory completely, or not at all.

    Yields a hidden directory beside ``path``, which the block fills; it gets its name when the
    block ends, and an empty directory of that name is replaced. Missing parents are created. Raises
    ``exists`` if the name is taken otherwise, and RunError if the directory cannot be made.
    """
    staging = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(mode=0o775)
        yield staging
        publish_directory(staging, path)
    except OSError as error:
        taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        if taken and os.path.lexists(path):
            raise exists from error
        message = f"cannot make {path}: {error.strerror}"
        hint = "check the path, its permissions and the free space"
        raise RunError(message, hint=hint, exit_code=exit_code_of(error)) from error
    finally:
        remove_tree(staging)


def publish_directory(staging: Path, final: Path) -> None:
    """Rename a complete directory to its final name, which is on disk when this returns.

    Raises OSError: ``final`` is a file or a directory that is not empty; nothing is changed.
    """
    staging.rename(final)
    sync_directory(final.parent)


def last_lines(path: Path, most_bytes: int = 1 << 16) -> list[str]:
    """Read the lines in the last bytes of a file; an incomplete first line is left out."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        lines = file.read().decode(errors="replace").splitlines()
    return (lines[1:] or lines) if size > most_bytes else lines


def read_fresh(path: Path) -> bytes:
    """Read a small file after a fresh ``open``; b"" if it does not exist.

    An ``open`` makes a network filesystem compare its cached copy with the server's file. NFSv3
    compares only size and times, and a server's clock may tick only every 10 ms. So a change is
    certain to be seen only if it changes the size, as `write_at` and `rewrite` do. A mount with
    ``nocto`` does not compare, and may return an old copy for as long as it caches attributes.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with closing(fd):
        return b"".join(iter(lambda: os.read(fd, 1 << 20), b""))


def write_at(path: Path, data: bytes, at: int) -> None:
    """Write at an offset of a small file whose size is the information; the file never shrinks.

    The highest offset written determines the size, in whatever order writers write. Bytes before
    it that nobody wrote are zeros.
    """
    with closing(open_or_create(path, os.O_WRONLY)) as fd:
        os.pwrite(fd, data, at)


def write_in_place(path: Path, data: bytes) -> None:
    """Create or `rewrite` a small file without a rename."""
    with closing(open_or_create(path, os.O_WRONLY)) as fd:
        rewrite(fd, data)


def rewrite(fd: int, data: bytes, *, sync: bool = False) -> None:
    """Replace the content of a small file by ``data`` and newlines, so that its size changes.

    ``data`` is one line of a fixed length, and only one process may write at a time. Readers use
    the first line, which always exists. It may be a mix of two rewrites, so it needs a checksum.
    Raises OSError: none, some or all of the data was written.
    """
    # An fstat would make an NFS client send earlier writes to the server.
    more = os.lseek(fd, 0, os.SEEK_END) - len(data) + 1
    if more > SIZES:
        os.ftruncate(fd, len(data))
        more = 1
    os.pwrite(fd, data + b"\n" * max(0, more), 0)
    if sync:
        os.fdatasync(fd)


def open_or_create(path: Path | str, flags: int) -> int:
    """Open a file that other processes may create at the same moment; return the descriptor.

    MooseFS reports to all but one of them that the file exists, although O_EXCL is not set.
    """
    try:
        return shared(os.open(path, flags | os.O_CREAT, 0o666), path)
    except FileExistsError:
        return os.open(path, flags)


def list_names(path: Path) -> list[str]:
    """Names in a directory; none if it does not exist. May be a minute old on NFS.

    Raises RunError if a file is in the place of the directory.
    """
    try:
        return os.listdir(path)
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise misplaced(error) from error


def misplaced(error: NotADirectoryError) -> RunError:
    from pathlib import Path

    named = Path(str(error.filename2 or error.filename))
    file = next((path for path in (named, *named.parents) if os.path.lexists(path)), named)
    hint = "move it away; 'hpctk doctor RUN --repair' then shows what can be rebuilt"
    return RunError(f"{file} is not a directory", hint=hint)


def missing_directory(error: OSError) -> Path | None:
    """The missing directory that caused ``error``; None for any other error."""
    from pathlib import Path

    named = error.filename2 or error.filename
    if error.errno != errno.ENOENT or not isinstance(named, str | os.PathLike):
        return None
    directory = Path(named).parent
    return None if directory.is_dir() else directory


def symlink_refusal(directory: Path) -> str:
    """Why symlinks cannot be created in ``directory``; "" if they can, OSError if unknown."""
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


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Report what the filesystem refused; a log entry is written completely or not at all."""
    try:
        yield
    except NotADirectoryError as error:
        raise misplaced(error) from error
    except OSError as error:
        message = f"cannot read or write {root}: {error}"
        hint = "check its permissions, the free space and your quota, then call again"
        exit_code = None if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else TRY_AGAIN
        raise RunError(message, hint=hint, exit_code=exit_code) from error


def grant(root: Path) -> None:
    """Let files that this process creates in a run have the group's permissions of ``root``."""
    with contextlib.suppress(OSError):
        _granted[f"{root.absolute()}/"] = root.stat().st_mode & stat.S_IRWXG


def shared(fd: int, path: Path | str) -> int:
    """Share the new file ``fd`` as :func:`share` does; returns ``fd``."""
    share(path, fd)
    return fd


def share(path: Path | str, fd: int | None = None) -> None:
    """Give a new file or directory the group's permissions that the umask may have withheld."""
    for root, granted in list(_granted.items()):  # another thread may open a run
        if granted and os.path.abspath(path).startswith(root):
            mode = os.stat(path).st_mode if fd is None else os.fstat(fd).st_mode
            missing = granted & (0o070 if stat.S_ISDIR(mode) else 0o060) & ~mode
            if missing:
                # Another user's file, or a filesystem without permissions, stays as it is.
                with contextlib.suppress(OSError):
                    os.chmod(path if fd is None else fd, stat.S_IMODE(mode) | missing)
