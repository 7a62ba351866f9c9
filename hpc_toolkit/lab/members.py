"""Find the processes of a lab by a mount that all of them inherit; kill them or report them.

Every daemon is started in a mount namespace where a hosts file of the lab covers /etc/hosts. The
name of that file holds the lab's token and the node. /proc/PID/mountinfo shows it for the daemon,
its jobs and their children, whatever parent, process group or environment they choose. A process
of root in a job may leave that mount by chroot(2) or umount(2); then the environment that Slurm
gave to the job identifies it. A process with neither the mount nor that environment is not found.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.directory import read_record
from hpc_toolkit.lab.settings import CLUSTER_NAME, CONTROL, lab_token
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.lab.settings import LabPaths, LabSettings

PROC = "/proc"
_KILL_S = 20.0
_PAUSE_S = 0.02
_SCAN_PAUSE_S = 0.05
LOOKS = 3
"""Scans until a process counts as gone: one scan can miss a daemon that forks and exits."""

_ANY_MARK = re.compile(r"/(hpctk-[0-9a-f]{16})\.[0-9a-f]+\.[a-z0-9]+(?:/+deleted)? ")


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a lab."""

    pid: int
    node: str
    """n1, n2 ..., or localhost for the daemons that belong to no node."""
    name: str
    """The command's name, as the kernel has it (at most 15 bytes)."""


def member_node(mounts: str, token: str) -> str | None:
    """Return the node of a process from its mountinfo; None if it is not of this lab."""
    mark = rf"/{re.escape(token)}\.[0-9a-f]+\.([a-z0-9]+)(?:/+deleted)? "
    match = re.search(mark, mounts)
    return match[1] if match else None


def job_lab(environ: Mapping[str, str]) -> tuple[Path, str] | None:
    """Return directory and node of the lab whose job set this environment; None without a lab.

    SLURM_CONF alone does not prove it: ``hpctk lab env`` sets it in a user's shell. The variables
    that slurmd sets must also name a lab; in a job of another cluster they name that cluster.
    """
    conf, node = Path(environ.get("SLURM_CONF", "")), environ.get("SLURMD_NODENAME")
    of_a_job = "SLURM_JOB_ID" in environ and environ.get("SLURM_CLUSTER_NAME") == CLUSTER_NAME
    if not of_a_job or not node or conf.parts[-2:] != ("etc", "slurm.conf"):
        return None
    return conf.parent.parent, node


def members(token: str, node: str | None = None) -> list[Member]:
    """Return the living processes of a lab, or of one of its nodes.

    A process that is created during the scan may be missing; see LOOKS. For an ordinary user only
    processes of root and of that user count: other users could fake the token to interfere.
    """
    found = []
    user = os.geteuid()
    for entry in os.listdir(PROC):
        if not entry.isdigit():
            continue
        # A process may end during the scan, be a zombie without mounts, or be unreadable for us.
        with contextlib.suppress(OSError):
            own = _node_in(entry, token)
            if own is None or node not in (None, own):
                continue
            if user == 0 or _real_user(entry) in (0, user):
                found.append(Member(int(entry), own, _read(entry, "comm").strip()))
    return found


def surrounding_labs() -> set[str]:
    """Return the tokens of the labs in which this process itself runs."""
    if marks := set(_ANY_MARK.findall(_read("self", "mountinfo"))):
        return marks
    told = job_lab(os.environ)
    return {lab_token(told[0])} if told is not None else set()


def _node_in(pid: str, token: str) -> str | None:
    mounts = _read(pid, "mountinfo")
    if (own := member_node(mounts, token)) is not None or _ANY_MARK.search(mounts):
        return own
    environ = dict(word.partition("=")[::2] for word in _read(pid, "environ").split("\0"))
    told = job_lab(environ)
    if told is None or lab_token(told[0]) != token or _has_own_lab(pid, told[0]):
        return None
    return told[1]


def _has_own_lab(pid: str, directory: Path) -> bool:
    """Whether a process has another root directory with another lab at the same path."""
    conf = f"{directory}/etc/slurm.conf"
    there = f"{PROC}/{pid}/root{conf}"
    return os.path.exists(there) and not os.path.samefile(there, conf)


def _real_user(pid: str) -> int:
    """The real UID of a process, which could make root the owner of /proc/PID: proc(5)."""
    match = re.search(r"^Uid:\s+(\d+)", _read(pid, "status"), re.MULTILINE)
    return int(match[1]) if match else -1


def _read(pid: str, name: str) -> str:
    return Path(PROC, pid, name).read_text(encoding="utf-8", errors="replace")


def kill_members(token: str, node: str | None = None, *, name: str | None = None) -> int:
    """Kill the processes of a lab, of a node or of a name, until none is left; return how many."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_S
    empty = 0
    while empty < LOOKS:
        left = [one for one in members(token, node) if name in (None, one.name)]
        empty = 0 if left else empty + 1
        for one in left:
            _kill(one, token)
            killed.add(one.pid)
        if left and time.monotonic() > deadline:
            named = ", ".join(f"{one.name} ({one.pid})" for one in left[:5])
            verb = "does" if len(left) == 1 else "do"
            message = f"{counted(len(left), 'process')} of the lab {verb} not exit: {named}"
            raise HpcToolkitError(message, hint="a disk or mount may hang; check with ps")
        if left:
            time.sleep(_PAUSE_S)
    return len(killed)


def _kill(member: Member, token: str) -> None:
    """Kill one process, but no other process that has got its PID meanwhile."""
    try:
        handle = os.pidfd_open(member.pid)
    except ProcessLookupError:
        return
    try:
        if _node_in(str(member.pid), token) is not None:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except PermissionError:
        message = f"process {member.pid} ({member.name}) belongs to another user"
        raise HpcToolkitError(
            message, hint="take the lab down as the user who started it"
        ) from None
    except (OSError, ProcessLookupError):
        return
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class LabStatus:
    """The status of a lab."""

    state: str
    """``up``; ``broken``: processes are left, but daemons are gone or the start did not complete;
    ``down``: no process is left."""
    paths: LabPaths
    settings: LabSettings | None
    """None if no lab is recorded."""
    slurm: str
    """Version of its Slurm, empty if it is not known."""
    port: int | None
    """The first of its ports."""
    processes: int
    crashed: tuple[str, ...]
    """Nodes that were crashed on purpose."""
    gone: tuple[str, ...]
    """Daemons that should run but do not, such as ``slurmd of n3``."""

    def to_json(self) -> dict[str, Any]:
        """The status as ``--json`` prints it."""
        return {
            "state": self.state,
            "directory": str(self.paths.root),
            "slurm_conf": str(self.paths.slurm_conf),
            "settings": asdict(self.settings) if self.settings else None,
            "slurm": self.slurm,
            "port": self.port,
            "processes": self.processes,
            "crashed": list(self.crashed),
            "gone": list(self.gone),
        }


def status_of(paths: LabPaths) -> LabStatus:
    """Return the status of the lab in a directory. Writes nothing."""
    record = read_record(paths)
    found = members(paths.token)
    crashed = _crashed(paths)
    wanted = _daemons(record.settings, crashed) if record is not None else []
    present = {(one.node, one.name) for one in found}
    # One scan can miss a daemon that re-executes itself (slurmd 23.11, 'scontrol reconfigure').
    for _ in range(LOOKS - 1):
        if not present.issuperset(wanted):
            time.sleep(_SCAN_PAUSE_S)
            present |= {(one.node, one.name) for one in members(paths.token)}
    gone = tuple(f"{name} of {node}" for node, name in wanted if (node, name) not in present)
    whole = record is not None and record.ready and not gone
    return LabStatus(
        state="up" if whole else "broken" if found else "down",
        paths=paths,
        settings=record.settings if record else None,
        slurm=record.slurm if record else "",
        port=record.port if record else None,
        processes=len(found),
        crashed=crashed,
        gone=gone,
    )


def _crashed(paths: LabPaths) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(paths.crashed)))
    except FileNotFoundError:
        return ()


def _daemons(settings: LabSettings, crashed: tuple[str, ...]) -> list[tuple[str, str]]:
    names = ["munged", "slurmctld", *(["mariadbd", "slurmdbd"] if settings.accounting else [])]
    nodes = [node for node in settings.node_names if node not in crashed]
    return [(CONTROL, name) for name in names] + [(node, "slurmd") for node in nodes]
