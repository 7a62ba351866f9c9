"""Check mount options that are known to be bad for a queue, free space and inodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict, fine, judged
from hpc_toolkit.rundir.mounts import LOCAL_LOCKS, NFS
from hpc_toolkit.system.quantities import format_size

if TYPE_CHECKING:
    from hpc_toolkit.rundir.mounts import Mount

_LONGEST_CACHE_S = 90
"""Half of the default lease: with heartbeats cached for longer, a living worker looks dead."""
_CACHE_TIMES = ("acregmax", "actimeo", "acdirmax")

LOCAL_LOCKS_MEAN = (
    "a lock held by one host keeps no other out. No claim rests on locks; a death on another host "
    "is seen by its lease. Programs that do rest on locks (SQLite, HDF5) are unsafe here"
)
_LATE = "other hosts see heartbeats and new items late, up to the time for which files are cached"

_LOST_WRITES = "a server that is slow for a while makes writes fail or vanish, see nfs(5)"

_ANYWHERE = {
    **dict.fromkeys(LOCAL_LOCKS, (Verdict.SLOWER, LOCAL_LOCKS_MEAN)),
    "ro": (Verdict.UNSAFE, "no worker can write here"),
    "nosymfollow": (Verdict.SLOWER, "links are read, which is enough, but no path may use them"),
}
_DELEGATIONS = "directory_delegations=Y"
"""The default of a parameter of the kernel module nfsv4, not an option of the mount."""
_DELEGATED = (
    "with Linux 7.2, workers of several hosts may wait for each other's new files for minutes; "
    "'options nfsv4 directory_delegations=N' in /etc/modprobe.d/ prevents it"
)
_ON_NFS = {
    **dict.fromkeys(("soft", "softerr"), (Verdict.UNSAFE, _LOST_WRITES)),
    "local_lock=posix": (Verdict.SLOWER, LOCAL_LOCKS_MEAN),
    "nocto": (Verdict.SLOWER, _LATE),
    "noac": (Verdict.SLOWER, "every look asks the server"),
    _DELEGATIONS: (Verdict.SLOWER, _DELEGATED),
}
_ON_SMB = {"cache=loose": (Verdict.UNSAFE, "other hosts may never see what is written here")}
_LEAST_BYTES = 100 * 2**20
_LEAST_FILES = 2000


def keeps_locks_of_lost_hosts(mount: Mount) -> str:
    """Return for how long a host that lost power or its network still holds its locks."""
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
    if mount.kind == "ceph" or mount.kind.startswith("fuse.ceph"):
        return (
            "a lost host (power, network) keeps its locks until CephFS evicts it, after 60 s by "
            "default; until then, workers on other hosts may pause"
        )
    return "a lost host (power, network) keeps its locks until the filesystem's servers notice"


def check_mount(mount: Mount, modules: Path = Path("/sys/module")) -> Finding:
    """Judge the options of a mount and of its kernel module, worst first."""
    given = [*mount.options, *_module_options(mount, modules)]
    harmful = [one for option in given if (one := _judge(mount, option)) is not None]
    order = [Verdict.UNSAFE, Verdict.SLOWER]
    harmful.sort(key=lambda one: order.index(one[1]))
    if not harmful:
        options = ", ".join(mount.options) or "there are none"
        return fine("mount options", f"none that is known to harm: {options}")
    found = ", ".join(dict.fromkeys(option for option, _, _ in harmful))
    means = "; ".join(dict.fromkeys(means for _, _, means in harmful))
    fix = "ask the site for another mount, or choose another directory"
    return Finding("mount options", harmful[0][1], found, means, fix)


def _module_options(mount: Mount, modules: Path) -> list[str]:
    name, _, value = _DELEGATIONS.partition("=")
    found = modules / "nfsv4" / "parameters" / name
    if mount.kind != "nfs4" or not found.exists():
        return []
    return [_DELEGATIONS] if found.read_text().strip() == value else []


def _judge(mount: Mount, option: str) -> tuple[str, Verdict, str] | None:
    """Return (option, verdict, meaning); None for an option that does no harm."""
    known = dict(_ANYWHERE)
    if mount.kind in NFS:
        known |= _ON_NFS
        name, _, value = option.partition("=")
        if name in _CACHE_TIMES and value.isdigit() and int(value) > _LONGEST_CACHE_S:
            known[option] = (Verdict.SLOWER, _LATE)
    if mount.kind in ("cifs", "smb3"):
        known |= _ON_SMB
    return (option, *known[option]) if option in known else None


def check_space(directory: Path) -> list[Finding]:
    """Check free bytes and free inodes, as statvfs(3) reports them to this user."""
    space = os.statvfs(directory)
    if not space.f_blocks:
        # Mounts of object stores, and others just after they are made, report a size of 0.
        found = "the filesystem does not tell its size"
        means = "free space is only known when something is written"
        fix = "ask those who run it, or their own tool, for quota and room"
        return [Finding("space", Verdict.UNKNOWN, found, means, fix)]
    free = space.f_bavail * space.f_frsize
    findings = [_judge_room("space", f"{format_size(free)} free", full=free < _LEAST_BYTES)]
    # Some filesystems report no number of files.
    if space.f_files:
        found = f"room for {space.f_favail:,} more files"
        findings.append(_judge_room("inodes", found, full=space.f_favail < _LEAST_FILES))
    return findings


def _judge_room(check: str, found: str, *, full: bool) -> Finding:
    means = "workers exit with 75 when the filesystem is full"
    fix = "remove what is not needed, or choose another directory"
    return judged(check, found, Verdict.UNSAFE, means, fix, bad=full)
