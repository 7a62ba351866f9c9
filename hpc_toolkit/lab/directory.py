"""The directory of a lab: who may change it, and its record, lab.json."""

from __future__ import annotations

import contextlib
import fnmatch
import grp
import json
import os
import pwd
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths, LabSettings, check_name
from hpc_toolkit.rundir.files import read_fresh, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_KEYS = {"format", "settings", "start"}
"""Keys that identify a lab's lab.json, whichever version wrote it."""
_BEGINNING = b'{"format": '


@dataclass(frozen=True, slots=True)
class LabRecord:
    """The contents of lab.json."""

    settings: LabSettings
    port: int
    start: str
    """Id of the lab's start: 8 hexadecimal digits."""
    ready: bool
    """Whether this start completed."""
    slurm: str = ""
    """Version of the lab's Slurm: 24.11.5."""


def labs_home() -> Path:
    """Return the directory of the labs that were started without --dir."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        home = state if state.is_absolute() else Path.home() / ".local/state"
    except RuntimeError:
        message = "this user has no home directory for labs"
        raise ConfigError(message, hint="give --dir, or set HOME or XDG_STATE_HOME") from None
    return home / "hpctk/labs"


def lab_paths(name: str, directory: Path | None) -> LabPaths:
    """Return the paths of the lab in ``directory``, or of the lab called ``name``."""
    where = directory if directory is not None else labs_home() / check_name(name)
    try:
        # Resolved, so that a lab has one token whatever path names it.
        return LabPaths(where.expanduser().resolve())
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"{where}: {error}", hint="give another directory with --dir") from None


def known_labs() -> Iterator[LabPaths]:
    """Yield the labs below labs_home(); directories that --name could not name are skipped."""
    for record in sorted(labs_home().glob("*/lab.json")):
        with contextlib.suppress(ConfigError):
            yield lab_paths(record.parent.name, None)


def make_directory(paths: LabPaths) -> None:
    """Create the lab's directory, or accept an empty one or that of a lab."""
    root = paths.root
    try:
        for above in reversed(root.parents):
            # An explicit mode: with a permissive umask, anybody could replace files below.
            if not above.exists():
                above.mkdir(mode=0o755, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        check_owner(root)
        # Listed before is_lab(): another 'up' may create files at the same moment.
        names = sorted(os.listdir(root))
        foreign = names if names and not is_lab(paths) else []
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        raise ConfigError(message, hint="give another directory with --dir") from None
    if foreign:
        message = f"{root}: contains files that do not belong to a lab, such as {foreign[0]}"
        raise ConfigError(message, hint="give an empty or new directory with --dir")
    # Daemons of root run the jobs of all users, those of another user only that user's jobs.
    root.chmod(0o755 if os.geteuid() == 0 else 0o700)


def is_lab(paths: LabPaths) -> bool:
    """Return whether a directory holds a lab or remains of one; no other directory is touched."""
    try:
        names = set(os.listdir(paths.root))
    except (FileNotFoundError, NotADirectoryError):
        return False
    left = set(fnmatch.filter(names, paths.unfinished_record))
    if paths.record.name not in names:
        # An 'up' that was killed before it wrote lab.json has only locked the directory.
        return bool(names) and names <= {paths.lock.name, *left} and _empty(paths.lock)
    text = read_fresh(paths.record)
    try:
        content: Any = json.loads(text)
    except ValueError:
        # Truncated by a full disk: a lab if nothing else is in the directory.
        own = {path.name for path in (*paths.written(), paths.record, paths.lock)}
        return names <= own | left and text[: len(_BEGINNING)] == _BEGINNING[: len(text)]
    return isinstance(content, dict) and content.keys() >= _KEYS


def _empty(path: Path) -> bool:
    return not path.exists() or (path.is_file() and path.stat().st_size == 0)


def check_owner(root: Path, *, others_of_root: bool = False) -> None:
    """Check that only this user and root can change files in ``root``.

    The directory must belong to this user; with ``others_of_root`` it may also belong to root.
    """
    told = root.lstat()
    if not stat.S_ISDIR(told.st_mode):
        raise ConfigError(f"{root}: not a directory", hint="give another directory with --dir")
    if told.st_uid not in {os.geteuid(), *((0,) if others_of_root else ())}:
        message = f"{root}: belongs to user {told.st_uid}, not to you"
        raise ConfigError(message, hint="choose a directory that you own with --dir")
    if told.st_mode & _OPEN_TO_OTHERS:
        raise ConfigError(f"{root}: other users can write to it", hint=f"chmod go-w {root}")
    for above in root.parents:
        if who := _who_may_replace(above):
            message = f"{root}: other users can replace it, since {who} can write to {above}"
            raise ConfigError(message, hint="give another directory with --dir")


def _who_may_replace(directory: Path) -> str:
    """Who besides this user and root can rename files in a directory; "" if nobody."""
    told = directory.stat()
    if told.st_uid not in (0, os.geteuid()) and not _is_unmapped(told.st_uid):
        return f"user {told.st_uid}"
    if told.st_mode & stat.S_ISVTX:
        return ""
    if told.st_mode & stat.S_IWOTH:
        return "all"
    shared = told.st_mode & stat.S_IWGRP and not _is_private_group(told)
    return f"group {told.st_gid}" if shared else ""


def _is_private_group(told: os.stat_result) -> bool:
    """Whether a file's group has its owner as the only member, as usual with umask 002."""
    try:
        owner, group = pwd.getpwuid(told.st_uid), grp.getgrgid(told.st_gid)
    except KeyError:
        return False
    own = (group.gr_name, group.gr_gid) == (owner.pw_name, owner.pw_gid)
    return own and set(group.gr_mem) <= {owner.pw_name}


def _is_unmapped(uid: int) -> bool:
    """Whether ``uid`` is how a user namespace shows root outside; user_namespaces(7)."""
    try:
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return False
    ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return uid == overflow and not any(first <= uid < first + count for first, count in ranges)


def remove_files(paths: LabPaths) -> None:
    """Remove a lab's files, lab.json last: after an interrupt, the next start can clean up."""
    for path in paths.written():
        shutil.rmtree(path, ignore_errors=True)
    for path in (*paths.root.glob(paths.unfinished_record), paths.record):
        path.unlink(missing_ok=True)


def write_record(paths: LabPaths, record: LabRecord) -> None:
    content = {"format": FORMAT, **asdict(record)}
    replace_file(paths.record, [json.dumps(content).encode() + b"\n"])
    # Users that may enter the directory may use the lab, whatever the umask of its owner.
    paths.record.chmod(0o644)


def read_record(paths: LabPaths) -> LabRecord | None:
    """Read lab.json; None if there is no lab, or if this version cannot read the file."""
    try:
        content: Any = json.loads(read_fresh(paths.record) or b"null")
        if content is None or content["format"] != FORMAT:
            return None
        settings = LabSettings(**content["settings"])
        return LabRecord(
            settings,
            int(content["port"]),
            str(content["start"]),
            bool(content["ready"]),
            str(content.get("slurm", "")),
        )
    except (ValueError, TypeError, KeyError, HpcToolkitError, OSError):
        # Damaged, or written by another version: treated as missing.
        return None
