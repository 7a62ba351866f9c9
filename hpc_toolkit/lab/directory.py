"""The directory of a lab: who may touch it, and what lab.json says of the lab in it."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.files import read_fresh, replace_file
from hpc_toolkit.lab.settings import LabPaths, LabSettings, check_name

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 1
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class LabRecord:
    """What lab.json says."""

    settings: LabSettings
    port: int
    """The first of the lab's ports."""
    start: str
    """Which start of the lab: 8 hexadecimal digits."""
    ready: bool
    """Whether this start came to its end."""


def labs_home() -> Path:
    """Where labs lie unless --dir says otherwise."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return home / "hpctk/labs"


def lab_paths(name: str, directory: Path | None) -> LabPaths:
    """The paths of the lab that a name, or a directory, means.

    Raises:
        ConfigError: neither can be a lab.
    """
    where = directory if directory is not None else labs_home() / check_name(name)
    # Resolved, so that a lab has one token by whichever path it is called.
    return LabPaths(where.expanduser().resolve())


def known_labs() -> Iterator[LabPaths]:
    """The labs below labs_home()."""
    home = labs_home()
    for record in sorted(home.glob("*/lab.json")) if home.is_dir() else ():
        yield LabPaths(record.parent.resolve())


def make_directory(paths: LabPaths) -> None:
    """Make the lab's directory, or accept the one that is there.

    Raises:
        ConfigError: somebody else could change what the daemons run, or it holds other files.
    """
    root = paths.root
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        check_owner(root)
        unfinished = {path.name for path in paths.unfinished_records()}
        others = set(os.listdir(root)) - {paths.lock.name} - unfinished
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        raise ConfigError(message, hint="give another directory with --dir") from None
    if others and not paths.record.exists():
        message = f"{root}: holds files that are not a lab's, such as {min(others)}"
        raise ConfigError(message, hint="give an empty or a new directory with --dir")
    # Root's daemons run everybody's jobs as who submitted them; a user's are for that user alone.
    root.chmod(0o755 if os.geteuid() == 0 else 0o700)


def check_owner(root: Path) -> None:
    """Return if nobody but this user and root can change what lies in ``root``.

    Raises:
        ConfigError: somebody can.
    """
    told = root.lstat()
    if not stat.S_ISDIR(told.st_mode):
        message = f"{root}: not a directory"
        raise ConfigError(message, hint="give another with --dir")
    if told.st_uid != os.geteuid():
        message = f"{root}: belongs to user {told.st_uid}, not to you"
        raise ConfigError(message, hint="a lab's directory belongs to who starts it; see --dir")
    if told.st_mode & _OPEN_TO_OTHERS:
        message = f"{root}: others may write there"
        raise ConfigError(message, hint=f"chmod go-w {root}")
    for above in root.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            message = f"{root}: others may replace it, since all may write to {above}"
            raise ConfigError(message, hint="give another directory with --dir")


def remove_files(paths: LabPaths, *, keep_logs: bool = False) -> None:
    """Remove what a lab wrote, lab.json last: until then its next start can clean up."""
    for path in (
        paths.etc, paths.hosts, paths.devices, paths.run, paths.state, paths.spool,
        paths.munge, paths.database, paths.crashed, *(() if keep_logs else (paths.logs,)),
    ):  # fmt: skip
        shutil.rmtree(path, ignore_errors=True)
    for path in (*paths.unfinished_records(), *(() if keep_logs else (paths.record,))):
        path.unlink(missing_ok=True)


def write_record(paths: LabPaths, record: LabRecord) -> None:
    """Write lab.json whole."""
    content = {
        "format": FORMAT,
        "settings": record.settings.to_json(),
        "port": record.port,
        "start": record.start,
        "ready": record.ready,
    }
    replace_file(paths.record, [json.dumps(content).encode() + b"\n"])
    # Whoever may enter the directory may use the lab, whatever the umask of who started it.
    paths.record.chmod(0o644)


def read_record(paths: LabPaths) -> LabRecord | None:
    """What lab.json says; None where there is no lab, or none that this version can read."""
    try:
        content: Any = json.loads(read_fresh(paths.record) or b"null")
        if content is None or content["format"] != FORMAT:
            return None
        settings = LabSettings(**content["settings"])
        return LabRecord(
            settings, int(content["port"]), str(content["start"]), bool(content["ready"])
        )
    except (ValueError, TypeError, KeyError, HpcToolkitError, OSError):
        # Cut short by a full disk or written by another version: as good as none.
        return None
