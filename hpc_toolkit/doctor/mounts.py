"""Find mount options that are known to be bad for a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.system.mounts import LOCAL_LOCKS, NFS

if TYPE_CHECKING:
    from hpc_toolkit.system.mounts import Mount

_LONGEST_CACHE_S = 90
"""Half of the default lease: with heartbeats cached for longer, a living worker looks dead."""
_CACHE_TIMES = ("acregmax", "actimeo", "acdirmax")

LOCAL_LOCKS_MEAN = (
    "a lock held by one host keeps no other out. No claim rests on locks; a death on another host "
    "is seen by its lease. Programs that do rest on locks (SQLite, HDF5) are unsafe here"
)
_LATE = "other hosts see heartbeats and new items late, up to the time for which files are cached"

_ANYWHERE = {
    **dict.fromkeys(LOCAL_LOCKS, (Verdict.SLOWER, LOCAL_LOCKS_MEAN)),
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
    return "a lost host (power, network) keeps its locks until the filesystem's servers notice"


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
        fix="ask the site for another mount, or choose another directory",
    )


def _all(mount: Mount) -> str:
    return ", ".join(mount.options) or "there are none"


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
