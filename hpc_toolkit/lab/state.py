"""What exists of a lab: its directory with lab.json, and its processes, which it finds by a mount.

Every daemon is started in a mount namespace where a hosts file of the lab covers /etc/hosts. The
name of that file holds the lab's token and the node. /proc/PID/mountinfo shows it for the daemon,
its jobs and their children, whatever parent, process group or environment they choose. A process
of root in a job may leave that mount by chroot(2) or umount(2); then the environment that Slurm
gave to the job identifies it. A process with neither the mount nor that environment is not found.
"""

from __future__ import annotations

import contextlib
import fnmatch
import grp
import json
import os
import pwd
import re
import shutil
import signal
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.settings import CLUSTER_NAME, CONTROL, LabPaths, LabSettings, lab_token
from hpc_toolkit.rundir.files import read_fresh, replace_file
from hpc_toolkit.system.quantities import counted

FORMAT = 1
PROC = "/proc"
_KILL_S = 20.0
_PAUSE_S = 0.02
_SCAN_PAUSE_S = 0.05
LOOKS = 3
"""Scans until a process counts as gone: one scan can miss a daemon that forks and exits."""
_ANY_MARK = re.compile(r"/(hpctk-[0-9a-f]{16})\.[0-9a-f]+\.[a-z0-9]+(?:/+deleted)? ")
_OPEN_TO_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_KEYS = {"format", "settings", "start"}
"""Keys that identify a lab's lab.json, whichever version wrote it."""


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
        return names <= own | left and b'{"format": '.startswith(text[:11])
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
    crashed: tuple[str, ...] = ()
    with contextlib.suppress(FileNotFoundError):
        crashed = tuple(sorted(os.listdir(paths.crashed)))
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


def _daemons(settings: LabSettings, crashed: tuple[str, ...]) -> list[tuple[str, str]]:
    names = ["munged", "slurmctld", *(["mariadbd", "slurmdbd"] if settings.accounting else [])]
    nodes = [node for node in settings.node_names if node not in crashed]
    return [(CONTROL, name) for name in names] + [(node, "slurmd") for node in nodes]
