"""Find, read and write cluster files, in four layers: built-in, site, user and project.

A file of a later layer overrides files of the same name in earlier layers, key by key. Cluster
files contain commands, so a file that others can write is refused.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.system.installation import config_directory
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Layer = Literal["built-in", "site", "user", "project", "path"]
"""The origin of a file; later ones take precedence. "path" is a file that was given by its path."""

SITE_DIRECTORY = "/etc/hpctk/clusters"
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    name: str
    """The cluster's name: the stem of the file."""
    layer: Layer
    file: str
    """Its name in errors; printable."""
    source: Traversable | Path


def cluster_files() -> list[ClusterFile]:
    """Return all cluster files, earlier layers first, each layer sorted by name.

    Raises ConfigError if ``HPCTK_SITE_CLUSTERS`` is not a directory, or a layer is unreadable.
    """
    found = list(_files_in("built-in", _builtin(), "clusters/"))
    site = Path(os.environ.get("HPCTK_SITE_CLUSTERS") or SITE_DIRECTORY)
    # Not Path.is_dir, which raises if a parent directory cannot be searched.
    if os.environ.get("HPCTK_SITE_CLUSTERS") and not os.path.isdir(site):
        msg = f"HPCTK_SITE_CLUSTERS: {str(site)!r} is not a directory"
        raise ConfigError(msg, hint="name the directory of the site's cluster files, or unset it")
    found += _files_in("site", site, f"{site}/")
    user = user_directory()
    if user is not None:
        found += _files_in("user", user, f"{user}/")
    found += _files_in("project", Path("clusters"), "./clusters/")
    return [one for one in found if not _repeats_builtin(one)]


def user_directory() -> Path | None:
    """Return the directory of the user's files; it need not exist. None if there is no home."""
    config = config_directory()
    return config / "clusters" if config is not None else None


def files_called(name: str) -> list[ClusterFile]:
    """Return the files of the cluster ``name``, earlier layers first; or the file at that path.

    A path has "/" or ends in ".toml". If that file belongs to a layer, the files that it overrides
    come before it. Raises ConfigError: unknown name.
    """
    if not name.isprintable():
        msg = f"cluster {name!r}: holds a control character"
        raise ConfigError(msg, hint="give a name of 'hpctk cluster list', or a path")
    if "/" in name or name.endswith(SUFFIX):
        source = Path(name)
        stem = source.name.removesuffix(SUFFIX)
        return with_earlier(ClusterFile(name=stem, layer="path", file=name, source=source))
    known = cluster_files()
    files = [found for found in known if found.name == name]
    if not files:
        msg = f"unknown cluster: {name!r}"
        hint = near_miss(name, sorted({found.name for found in known}))
        raise ConfigError(msg, hint=f"{hint}; or give a path to a TOML file")
    return files


def with_earlier(found: ClusterFile) -> list[ClusterFile]:
    """Return the files of earlier layers that ``found`` overrides, and then ``found``."""
    known = [one for one in cluster_files() if one.name == found.name]
    places = [place for place, one in enumerate(known) if _same(one, found)]
    return [*known[: places[0]], found] if places else [found]


def _same(one: ClusterFile, other: ClusterFile) -> bool:
    if not isinstance(one.source, Path) or not isinstance(other.source, Path):
        return one == other
    try:
        return one.source.samefile(other.source)
    except OSError:
        return False


def read_table(found: ClusterFile) -> dict[str, Any]:
    """Read a file's TOML table, unchecked. Raises ConfigError: unreadable, unsafe, not TOML."""
    try:
        text = _bytes(found).decode("utf-8")
    except OSError as error:
        msg = f"{found.file}: cannot be read: {error.strerror}"
        raise ConfigError(msg, hint="'hpctk cluster list' shows the available clusters") from None
    except UnicodeDecodeError:
        msg = f"{found.file}: is not UTF-8 text"
        raise ConfigError(msg, hint="write the cluster file as TOML") from None
    return parse_table(text, found.file)


def parse_table(text: str, file: str) -> dict[str, Any]:
    """Parse ``text`` into a TOML table; errors call it ``file``. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"{file}: {error}"
    except ValueError:
        # Python limits the digits of an int; tomllib translates neither this error nor the next.
        msg = f"{file}: contains a number with thousands of digits"
    except RecursionError:
        msg = f"{file}: is nested hundreds of levels deep"
    raise ConfigError(msg, hint="write the cluster file as TOML")


def write_draft(name: str, text: str, *, out: str | None, force: bool) -> Path:
    """Write a draft, by default to the user's cluster files, and return its path.

    Raises ConfigError if the file exists and ``force`` is not set, or if it cannot be written.
    """
    directory = Path(out).parent if out else user_directory()
    if directory is None:
        raise ConfigError("this user has no home directory", hint="choose a file with -o")
    path = directory / (Path(out).name if out else f"{name}{SUFFIX}")
    if path.exists() and not force:
        msg = f"{path}: the file exists"
        raise ConfigError(msg, hint="--force overwrites it; -o FILE writes another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, [text.encode()])
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror}"
        raise ConfigError(msg, hint="give another file with -o") from None
    return path


def _bytes(found: ClusterFile) -> bytes:
    if not isinstance(found.source, Path):
        return found.source.read_bytes()
    # Check the open file, not its name: another file may get that name between check and read.
    with open(found.source, "rb", opener=_open_regular) as file:
        if found.layer != "built-in":
            _refuse_unsafe(found, found.source, os.fstat(file.fileno()))
        return file.read()


def _open_regular(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a pipe that has no writer would block.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file")


@functools.cache
def _builtin() -> Traversable:
    return resources.files("hpc_toolkit.slurm") / "data" / "clusters"


def _files_in(layer: Layer, directory: Traversable | Path, shown: str) -> Iterator[ClusterFile]:
    try:
        names = sorted(entry.name for entry in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        msg = f"{shown}: cannot be read: {error.strerror}"
        hint = "make it readable, or remove it, so that no facts are missing silently"
        raise ConfigError(msg, hint=hint) from None
    for name in names:
        if name.endswith(SUFFIX) and not name.startswith("."):
            source, stem = directory / name, name.removesuffix(SUFFIX)
            file = f"{shown}{printable(name)}"
            yield ClusterFile(name=stem, layer=layer, file=file, source=source)


def _repeats_builtin(found: ClusterFile) -> bool:
    """Return whether a project's file equals the built-in one, as in hpctk's own working tree."""
    if found.layer != "project":
        return False
    builtin = _builtin() / f"{found.name}{SUFFIX}"
    try:
        return builtin.is_file() and builtin.read_bytes() == _bytes(found)
    except (OSError, ConfigError):
        return False


def _refuse_unsafe(found: ClusterFile, path: Path, info: os.stat_result) -> None:
    """Raise ConfigError if anyone may replace a file, or if a project's file is another user's."""
    directories = {path.parent.stat(), path.resolve().parent.stat()}
    if info.st_mode & stat.S_IWOTH or any(map(_open_to_all, directories)):
        msg = f"{found.file}: it is world-writable, and its commands would run as you"
        hint = f"chmod o-w {str(path.parent)!r} {str(path)!r}, after reading it"
        raise ConfigError(msg, hint=hint)
    owners = {one.st_uid for one in (info, *directories)}
    if found.layer == "project" and not owners <= {os.getuid(), 0}:
        msg = f"{found.file}: it or its directory belongs to another user, and its commands would"
        msg += " run as you"
        hint = f"if you trust it, give its path: --cluster {found.file}"
        raise ConfigError(msg, hint=hint)


def _open_to_all(directory: os.stat_result) -> bool:
    # In a sticky directory such as /tmp nobody can replace another user's file.
    return bool(directory.st_mode & stat.S_IWOTH) and not directory.st_mode & stat.S_ISVTX
