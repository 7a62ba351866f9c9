"""What may be trusted of a run: its owner, and the locks of the filesystem that holds it.

Whoever can change a run decides which code it runs. The user's file ``trusted`` names directories,
which include everything below them, and owners as ``user:NAME``. Of a filesystem, this host's mount
and an examination by two hosts decide.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.system.record import Record
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.rundir.layout import RunPaths

OWNER = "user:"
MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")
NFS = ("nfs", "nfs4")
LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "nobrl"}
"""Mount options under which locks do not reach other hosts."""

# Filesystems whose metadata is local to this kernel: frequent polling costs other hosts nothing.
_LOCAL_FILESYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "f2fs"}
)

_FORMAT = 1
_MAX_LEAST_LEASE_S = 3600.0
"""Longer than any examination measures; a longer lease would keep deaths from being seen."""


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


class Mount(Record):
    """One line of /proc/self/mountinfo (proc(5))."""

    point: str
    """Mount point; "" if unknown."""
    kind: str
    """The kernel's name for the type of filesystem, or "unknown"."""
    source: str
    """The server's export, or the device."""
    options: tuple[str, ...]
    """Options of the mount and of the filesystem."""

    @property
    def locks_are_local(self) -> bool:
        return not LOCAL_LOCKS.isdisjoint(self.options)


def mount_of(directory: Path) -> Mount:
    """The mount that holds ``directory``, after following symlinks."""
    real = os.path.realpath(directory)
    best = Mount("", "unknown", "", ())
    # Any mount point of this host is in there, also one whose name is not UTF-8.
    with suppress(OSError), open(MOUNTINFO, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            mount = parse_mount(line)
            inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
            # Of two mounts on one directory, the later one hides the earlier one.
            if inside and len(mount.point) >= len(best.point):
                best = mount
    return best


def parse_mount(line: str) -> Mount:
    left, _, right = line.partition(" - ")
    fields = left.split()
    kind, source, options = [*right.split(), ""][:3]
    every = dict.fromkeys((*fields[5].split(","), *options.split(",")))
    return Mount(_plain(fields[4]), kind, _plain(source), tuple(one for one in every if one))


def _plain(text: str) -> str:
    """Decode the octal escapes that mountinfo writes for spaces and similar characters."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def is_local(path: Path) -> bool:
    """Whether the filesystem below ``path`` is known to belong to this kernel alone.

    HPCTK_FILESYSTEM, ``local`` or ``shared``, overrides the filesystem type, for tests and for a
    local disk that other hosts mount.
    """
    said = os.environ.get("HPCTK_FILESYSTEM")
    if said in {"local", "shared"}:
        return said == "local"
    return mount_of(path).kind in _LOCAL_FILESYSTEMS


def write_proof(path: Path, record: dict[str, Any]) -> None:
    """Store the result of an examination; a reader sees the old record or the new one.

    ``record`` has ``sides`` as :class:`hpc_toolkit.doctor.sides.Side` as JSON, and
    ``locks_proven``. After an OSError an older record stays.
    """
    files.replace_file(path, [json.dumps({"format": _FORMAT, **record}, indent=2).encode() + b"\n"])


class Proof(Record):
    """Proven properties of a run's filesystem, as this host mounts it."""

    locks: bool = False
    """Whether a free lock proves that a worker on another host is dead (rule R6)."""
    least_lease_s: float = 0.0
    """Twice the longest delay of a change; silence shorter than this proves nothing."""
    said: str = ""
    """Summary for people; "" if there was no problem and locks are not proven."""


def believed(paths: RunPaths) -> Proof:
    """Read the proof that applies to a run as this host mounts it.

    A record from another filesystem is ignored, because the run may have been copied since. Proven
    locks do not count if this host's mount keeps locks local.
    """
    try:
        record = json.loads(files.read_fresh(paths.doctor))
        here = mount_of(paths.root)
        if record["format"] != _FORMAT or (here.kind, here.source) not in {
            (side["mount"]["kind"], side["mount"]["source"]) for side in record["sides"]
        }:
            return Proof()
        locks = record["locks_proven"] is True and not here.locks_are_local
        troubles = dict.fromkeys(one["check"] for one in record.get("troubles", ()))
        said = [f"{record.get('verdict', 'unknown')}: {', '.join(troubles)}"] if troubles else []
        said += ["locks are proven between hosts"] if locks else []
        least_s = float(record.get("least_lease_s", 0.0))
        if not 0 <= least_s <= _MAX_LEAST_LEASE_S:  # NaN as well
            said.append(f"least_lease_s = {least_s:g} in {paths.doctor.name} is ignored")
            least_s = 0.0
        return Proof(locks, least_s, "; ".join(said))
    # RecursionError is a RuntimeError.
    except (AttributeError, KeyError, OSError, OverflowError, RuntimeError, TypeError, ValueError):
        return Proof()
