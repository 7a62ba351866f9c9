"""How a directory is mounted here, and which mount options are known to be wrong for a queue."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from pathlib import Path

_ESCAPE = re.compile(r"\\([0-7]{3})")
NFS = ("nfs", "nfs4")
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "nobrl"}
_LONGEST_CACHE_S = 90
"""Half of the default lease: a heartbeat that is cached for longer ends a living worker's lease."""
_CACHE_TIMES = ("acregmax", "actimeo", "acdirmax")

LOCAL_LOCKS_MEAN = (
    "a lock held by one host keeps no other out. No claim rests on locks; a death on another host "
    "is seen by its lease. Programs that do rest on locks (SQLite, HDF5) are unsafe here"
)
_LATE = "other hosts see heartbeats and new items late, up to the time for which files are cached"

_ANYWHERE = {
    **dict.fromkeys(_LOCAL_LOCKS, (Verdict.SLOWER, LOCAL_LOCKS_MEAN)),
    "ro": (Verdict.UNSAFE, "no worker can write here"),
    "nosymfollow": (Verdict.SLOWER, "links are read, which is enough, but no path may use them"),
}
_ON_NFS = {
    **dict.fromkeys(
        ("soft", "softerr"),
        (
            Verdict.UNSAFE,
            "a server that is slow for a while makes writes fail or vanish, see nfs(5)",
        ),
    ),
    "local_lock=posix": (Verdict.SLOWER, LOCAL_LOCKS_MEAN),
    "nocto": (Verdict.SLOWER, _LATE),
    "noac": (Verdict.SLOWER, "every look asks the server"),
}
_ON_SMB = {"cache=loose": (Verdict.UNSAFE, "other hosts may never see what is written here")}


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5))."""

    point: str
    """Where it is mounted; "" if unknown."""
    kind: str
    """The kernel's name for the type of filesystem, or "unknown"."""
    source: str
    """The server's export, or the device."""
    options: tuple[str, ...]
    """Of the mount and of the filesystem."""

    @property
    def locks_are_local(self) -> bool:
        """Whether its options say that locks do not reach beyond this host."""
        return not _LOCAL_LOCKS.isdisjoint(self.options)


def keeps_locks_of_lost_hosts(mount: Mount) -> str:
    """For how long a host that lost power or its network still holds its locks."""
    if mount.kind == "nfs4":
        return (
            "a lost host (power, network) keeps its locks until its lease on the NFS server ends, "
            "after 90 s by default"
        )
    if mount.kind == "nfs":
        return (
            "a lost host (power, network) keeps its locks until it has booted again and told the "
            "NFSv3 server so; if it stays away, the lease of hpctk decides, 180 s by default"
        )
    return "a lost host (power, network) keeps its locks until the filesystem's servers notice"


def mount_of(directory: Path) -> Mount:
    """The mount that holds ``directory``, links followed."""
    real = os.path.realpath(directory)
    best = Mount("", "unknown", "", ())
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8") as lines:
        for line in lines:
            mount = parse_mount(line)
            inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
            # Of two mounts on one directory the later one covers the first.
            if inside and len(mount.point) >= len(best.point):
                best = mount
    return best


def parse_mount(line: str) -> Mount:
    """Read one line of mountinfo."""
    left, _, right = line.partition(" - ")
    fields = left.split()
    kind, source, options = [*right.split(), ""][:3]
    every = dict.fromkeys((*fields[5].split(","), *options.split(",")))
    return Mount(_plain(fields[4]), kind, _plain(source), tuple(one for one in every if one))


def _plain(text: str) -> str:
    """Spaces and the like are written as octal numbers."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


def check_mount(mount: Mount) -> Finding:
    """Judge the mount options, worst first."""
    judged = [found for option in mount.options if (found := _judge(mount, option)) is not None]
    order = [Verdict.UNSAFE, Verdict.SLOWER]
    judged.sort(key=lambda one: order.index(one[1]))
    if not judged:
        return Finding(
            check="mount options",
            verdict=Verdict.FINE,
            found=f"none that is known to harm: {_all(mount)}",
        )
    return Finding(
        check="mount options",
        verdict=judged[0][1],
        found=", ".join(dict.fromkeys(option for option, _, _ in judged)),
        means="; ".join(dict.fromkeys(means for _, _, means in judged)),
        mend="ask the site for another mount, or choose another directory",
    )


def _all(mount: Mount) -> str:
    return ", ".join(mount.options) or "there are none"


def _judge(mount: Mount, option: str) -> tuple[str, Verdict, str] | None:
    """(option, verdict, what it means); None for an option that does no harm."""
    known = dict(_ANYWHERE)
    if mount.kind in NFS:
        known |= _ON_NFS
        name, _, value = option.partition("=")
        if name in _CACHE_TIMES and value.isdigit() and int(value) > _LONGEST_CACHE_S:
            known[option] = (Verdict.SLOWER, _LATE)
    if mount.kind in ("cifs", "smb3"):
        known |= _ON_SMB
    return (option, *known[option]) if option in known else None
