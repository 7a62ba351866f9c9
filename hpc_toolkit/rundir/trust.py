"""Which runs of other users this user trusts, and the group's permissions of a run's files.

Whoever can change a run decides which code it runs. The user's file ``trusted`` names directories,
which include everything below them, and owners as ``user:NAME``.
"""

from __future__ import annotations

import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.system.terminal import note

OWNER = "user:"
_granted: dict[str, int] = {}
"""Permissions of the group on the runs of this process, by absolute path with a final slash."""


def check_trust(root: Path) -> str:
    """Reject a run that everybody can write to, or whose owner this user does not trust.

    The user and root are trusted; another user could have set its workload. Returns a warning or
    "".
    """
    for path in (root, root / "run.json"):
        info = path.stat()
        if info.st_mode & stat.S_IWOTH:
            message = f"{path} is world-writable, and its code would run as you"
            raise RunError(message, hint=f"chmod o-w {str(path)!r}")
        if info.st_uid not in (0, os.getuid()) and not _is_trusted(root, info.st_uid):
            message = f"{path} belongs to user {info.st_uid}, and its code would run as you"
            hint = f"create your own run, or, if you trust its owner: hpctk trust {str(root)!r}"
            raise RunError(message, hint=hint)
    if root.stat().st_mode & stat.S_IWGRP:
        return f"{root} is writable by its group, whose members can change the code that it names"
    return ""


def refuse_untrusted(root: Path) -> None:
    """Call :func:`check_trust`, and print its warning."""
    if warning := check_trust(root):
        note(warning, "warning")


def _is_trusted(root: Path, owner: int) -> bool:
    entries = trusted()
    here = Path(os.path.realpath(root))
    with suppress(KeyError):
        entries += [str(here)] if f"{OWNER}{pwd.getpwuid(owner).pw_name}" in entries else []
    return any(here.is_relative_to(entry) for entry in entries if entry.startswith("/"))


def trusted_file() -> Path:
    """The user's file of trusted directories and owners; ConfigError if there is no home."""
    from hpc_toolkit.system.installation import config_directory  # few runs need it

    config = config_directory()
    if config is None:
        message = "there is no home directory for settings"
        raise ConfigError(message, hint="set XDG_CONFIG_HOME to a directory")
    return config / "trusted"


def trusted() -> list[str]:
    """Entries of the user's file, sorted; ConfigError if others can change the file."""
    path = trusted_file()
    try:
        with path.open(encoding="utf-8") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                message = f"{path} can be changed by other users, and it names whose code you run"
                raise ConfigError(message, hint=f"check it, then chmod go-w {str(path)!r}")
            return sorted({line.strip() for line in file} - {""})
    except FileNotFoundError:
        return []


def grant(root: Path) -> None:
    """Let files that this process creates in a run have the group's permissions of ``root``."""
    with suppress(OSError):
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
                with suppress(OSError):
                    os.chmod(path if fd is None else fd, stat.S_IMODE(mode) | missing)
