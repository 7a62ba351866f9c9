"""How a directory is mounted on this host."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.system.record import Record

MOUNTINFO = "/proc/self/mountinfo"
_ESCAPE = re.compile(r"\\([0-7]{3})")
NFS = ("nfs", "nfs4")
LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "nobrl"}
"""Mount options under which locks do not reach other hosts."""


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
