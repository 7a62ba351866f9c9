"""Where cluster files are: built-in, of the site, of the user, of the project; later ones win.

A file of a later layer with the same name overrides the earlier ones key by key. Cluster files name
commands, so one that others can write is refused.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

Layer = Literal["built-in", "site", "user", "project", "path"]
"""Where a file is from; in order of precedence, "path" being one that was named by its path."""

SITE_DIRECTORY = "/etc/hpctk/clusters"
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """One file that states facts of a cluster."""

    name: str
    """The cluster's name: the stem of the file."""
    layer: Layer
    """Where it is from."""
    file: str
    """What errors call it; it prints."""
    source: Traversable | Path
    """What is read."""


def cluster_files() -> list[ClusterFile]:
    """Every cluster file in reach, earlier layers first, each layer sorted by name.

    Raises ConfigError if ``HPCTK_SITE_CLUSTERS`` names no directory, or one cannot be read.
    """
    found = list(_files_in("built-in", _builtin(), "clusters/"))
    site = site_directory()
    # Not Path.is_dir, which raises where a directory above it cannot be searched.
    if os.environ.get("HPCTK_SITE_CLUSTERS") and not os.path.isdir(site):
        msg = f"HPCTK_SITE_CLUSTERS: {str(site)!r} is no directory"
        raise ConfigError(msg, hint="name the directory of the site's cluster files, or unset it")
    found += _files_in("site", site, f"{site}/")
    user = user_directory()
    if user is not None:
        found += _files_in("user", user, f"{user}/")
    found += _files_in("project", Path("clusters"), "./clusters/")
    return [one for one in found if not _repeats_builtin(one)]


def site_directory() -> Path:
    """The directory of the site's files, which need not exist."""
    return Path(os.environ.get("HPCTK_SITE_CLUSTERS") or SITE_DIRECTORY)


def user_directory() -> Path | None:
    """The directory of the user's files, which need not exist; None for a user without a home."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        # The XDG base directory specification has a relative path ignored.
        base = Path(config) if config.startswith("/") else Path.home() / ".config"
    except RuntimeError:
        return None
    return base / "hpctk" / "clusters"


def files_called(name: str) -> list[ClusterFile]:
    """The files of the cluster ``name``, earlier layers first; or the one whose path it is.

    A path has "/" or ".toml"; where it is that of a layer's own file, the files that this one
    overrides come before it. Raises ConfigError: unknown name.
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
        msg = f"no cluster is called {name!r}"
        hint = near_miss(name, sorted({found.name for found in known}))
        raise ConfigError(msg, hint=f"{hint}; or give the path of a TOML file")
    return files


def with_earlier(found: ClusterFile) -> list[ClusterFile]:
    """A file, after those of earlier layers that it overrides."""
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
    """What a file says, unchecked. Raises ConfigError: unreadable, unsafe, not TOML."""
    try:
        text = _bytes(found).decode("utf-8")
    except OSError as error:
        msg = f"{found.file}: cannot be read: {error.strerror}"
        raise ConfigError(msg, hint="'hpctk cluster list' shows what is in reach") from None
    except UnicodeDecodeError:
        msg = f"{found.file}: is not UTF-8 text"
        raise ConfigError(msg, hint="a cluster file is TOML") from None
    return parse_table(text, found.file)


def parse_table(text: str, file: str) -> dict[str, Any]:
    """The TOML table of a ``text``; ``file`` is what errors call it. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        msg = f"{file}: {error}"
    except ValueError:
        # Python's own limit, which tomllib does not translate; so is the next one.
        msg = f"{file}: holds a number of thousands of digits"
    except RecursionError:
        msg = f"{file}: is nested hundreds of levels deep"
    raise ConfigError(msg, hint="a cluster file is TOML")


def _bytes(found: ClusterFile) -> bytes:
    if not isinstance(found.source, Path):
        return found.source.read_bytes()
    # What is checked is what is read: between two looks at a name somebody may put another there.
    with open(found.source, "rb", opener=_open_regular) as file:
        if found.layer != "built-in":
            _refuse_unsafe(found, found.source, os.fstat(file.fileno()))
        return file.read()


def _open_regular(path: str, flags: int) -> int:
    # A pipe without a writer would hold up the opening.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISDIR(kind):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is no regular file")


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
        hint = "what it says would silently be missing; make it readable, or remove it"
        raise ConfigError(msg, hint=hint) from None
    for name in names:
        if name.endswith(SUFFIX) and not name.startswith("."):
            source, stem = directory / name, name.removesuffix(SUFFIX)
            file = f"{shown}{printable(name)}"
            yield ClusterFile(name=stem, layer=layer, file=file, source=source)


def _repeats_builtin(found: ClusterFile) -> bool:
    """Whether a project's file is the built-in one: this project's own working tree."""
    if found.layer != "project":
        return False
    builtin = _builtin() / f"{found.name}{SUFFIX}"
    try:
        return builtin.is_file() and builtin.read_bytes() == _bytes(found)
    except (OSError, ConfigError):
        return False


def _refuse_unsafe(found: ClusterFile, path: Path, info: os.stat_result) -> None:
    """Raise ConfigError for a file that others can write, or a project's file of somebody else."""
    directories = {path.parent.stat(), path.resolve().parent.stat()}
    if info.st_mode & stat.S_IWOTH or any(map(_open_to_all, directories)):
        msg = f"{found.file}: everybody may write it, and its commands would run as you"
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
