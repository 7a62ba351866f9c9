"""Check the free space of the filesystem: bytes, inodes, and quotas if a program shows them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.system.quantities import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.system.mounts import Mount

_LEAST_BYTES = 100 * 2**20
_LEAST_FILES = 2000
_QUOTA_S = 5.0
_FULL = "workers write nothing more and end with 75 when there is no room"
_MAKE_ROOM = "remove what is not needed, or choose another directory"


def check_space(directory: Path) -> list[Finding]:
    """Check free bytes and free inodes, as statvfs(3) reports them to this user."""
    space = os.statvfs(directory)
    if not space.f_blocks:
        # Mounts of object stores, and others just after they are made, report a size of 0.
        return [
            Finding(
                check="space",
                verdict=Verdict.UNKNOWN,
                found="the filesystem does not tell its size",
                means="whether there is room shows when something is written",
                fix="ask those who run it, or their own tool, for quota and room",
            )
        ]
    free = space.f_bavail * space.f_frsize
    little = free < _LEAST_BYTES
    findings = [
        Finding(
            check="space",
            verdict=Verdict.UNSAFE if little else Verdict.FINE,
            found=f"{format_size(free)} free",
            means=_FULL if little else "",
            fix=_MAKE_ROOM if little else "",
        )
    ]
    # Some filesystems report no number of files.
    if space.f_files:
        few = space.f_favail < _LEAST_FILES
        findings.append(
            Finding(
                check="inodes",
                verdict=Verdict.UNSAFE if few else Verdict.FINE,
                found=f"room for {space.f_favail:,} more files",
                means=_FULL if few else "",
                fix=_MAKE_ROOM if few else "",
            )
        )
    return findings


def check_quota(mount: Mount) -> list[Finding]:
    """Check the quota that a quota program prints; [] without a program or its output."""
    told = _ask_quota(mount)
    if not told:
        return []
    # Both programs mark a value above its limit with a star.
    over = re.search(r"\d\*", told) is not None
    return [
        Finding(
            check="quota",
            verdict=Verdict.UNSAFE if over else Verdict.FINE,
            found=told,
            means=_FULL if over else "",
            fix=_MAKE_ROOM if over else "",
        )
    ]


def _ask_quota(mount: Mount) -> str:
    user = str(os.getuid())
    if mount.kind == "lustre" and shutil.which("lfs"):
        return _last_words(["lfs", "quota", "-q", "-u", user, mount.point])
    if shutil.which("quota"):
        return _last_words(["quota", "-w", "-s", "-f", mount.point])
    return ""


def _last_words(argv: list[str]) -> str:
    """Return the last line that a program prints, without runs of spaces; "" if it fails."""
    with suppress(OSError, subprocess.TimeoutExpired):
        ended = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_QUOTA_S,
            check=False,
        )
        lines = ended.stdout.decode(errors="replace").split("\n")
        return " ".join(next((one for one in reversed(lines) if one.strip()), "").split())
    return ""
