"""Check a filesystem: its mount, free space, exclusive names, and how late changes are seen."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.doctor.sides import Finding, Pair, Verdict, fine, judged
from hpc_toolkit.queue.presence import Presence, PresenceFile, read_presence
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.rundir.trust import LOCAL_LOCKS, NFS, Mount
from hpc_toolkit.system.quantities import format_duration, format_size
from hpc_toolkit.system.ranks import boot_id, host_name

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


LOST_HOSTS = (
    "a lost host (power, network) keeps its locks until the filesystem's servers notice, 60 s or "
    "more (docs/how-to/doctor.md)"
)


def check_mount(mount: Mount, modules: Path = Path("/sys/module")) -> Finding:
    """Judge the options of a mount and of its kernel module, worst first."""
    given = [*mount.options, *_module_options(mount, modules)]
    harmful = [one for option in given if (one := _judge(mount, option)) is not None]
    harmful.sort(key=lambda one: one[1] is not Verdict.UNSAFE)
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


RACE_S = 1.0
_MOST_NAMES = 600
_CHOOSE = "choose a directory on another filesystem"


def race(directory: Path, own: str) -> dict[str, int]:
    """Create names in the same order as the other side; return the counts.

    ``won`` and ``lost`` count names, ``nowhere`` the lost names that nobody got, and ``tried`` is
    the index after the last name. The loser of a name skips ahead, so that both sides keep meeting.
    """
    end = time.monotonic() + RACE_S
    index, counts = 0, Counter(won=0, lost=0, nowhere=0)
    while counts["won"] < _MOST_NAMES and time.monotonic() < end:
        try:
            won = files.create_name(directory / str(index), own) == own
        except FileNotFoundError:
            # GlusterFS may refuse a name to both racing sides, and not have it afterwards.
            won = False
            counts["nowhere"] += 1
        counts["won" if won else "lost"] += 1
        index += 1 if won else random.randint(1, 3)
    return {**counts, "tried": index}


def check_names(pair: Pair) -> list[Finding]:
    """Check that symlinks work; then race for names."""
    refusal = files.symlink_refusal(pair.area)
    if refusal:
        means = "claims and log entries are symlinks; no run can be made here"
        found = f"cannot be made: {refusal}"
        return [Finding("symlinks", Verdict.UNSAFE, found, means, _CHOOSE)]
    return [_check_race(pair)]


def _check_race(pair: Pair) -> Finding:
    check, directory = "exclusive names", pair.area / "race"
    directory.mkdir()
    asked = time.monotonic()
    pair.ask("where")
    pair.start("race", own="other")
    # Wait until the other side has read the request: otherwise a fast disk would see no race.
    time.sleep(min(RACE_S / 2, (time.monotonic() - asked) / 2))
    began = time.monotonic()
    mine = race(directory, "lead")
    seconds = max(time.monotonic() - began, 1e-6)
    theirs: dict[str, int] = pair.finish()
    owners = Counter(_owner(directory / str(i)) for i in range(max(mine["tried"], theirs["tried"])))
    del owners[""]
    claimed = {"lead": mine["won"], "other": theirs["won"]}
    names, lost = sum(claimed.values()), mine["lost"] + theirs["lost"]
    rate = (mine["won"] + mine["lost"]) / seconds
    if {name: count for name, count in claimed.items() if count} != dict(owners):
        found = f"{names} names were won, but they belong to {dict(owners)}"
        means = "two workers can own one claim; a run here repeats work or loses its order"
        return Finding(check, Verdict.UNSAFE, found, means, _CHOOSE)
    nowhere = mine["nowhere"] + theirs["nowhere"]
    if nowhere:
        found = f"{names} names were won, each by one; {nowhere} were refused and are not there"
        means = "no claim has two owners, but a worker that meets such a name ends with 75"
        fix = "start workers again when they ended so; nothing is lost"
        return Finding(check, Verdict.SLOWER, found, means, fix)
    found = f"{names:,} names, {lost:,} of which both sides tried to create: each has one owner "
    found += f"({rate:,.0f} tries/s)"
    if lost:
        return fine(check, found, "a claim has one owner")
    means = "the two sides never met at a name"
    return Finding(check, Verdict.UNKNOWN, found, means, "run it again")


def _owner(path: Path) -> str:
    """The target of a name; "" if both sides skipped it."""
    with suppress(FileNotFoundError):
        return os.readlink(path)
    return ""


LIMIT_S = 65.0
"""Longer than 60 s, for which NFS caches a directory by default (acdirmax in nfs(5))."""
_PROMPT_S = 5.0
_BEFORE, _AFTER = b"0" * 64, b"1" * 64
_SECONDS = 1.0
_MOST_SYNCS = 50
_SLOW_SYNC_S = 0.1
_LINE = b"x" * 199 + b"\n"
_DELAY_MEANS = {
    "new file": "idle workers learn of new items that much later",
    "directory": "claims and new workers are noticed that much later; some work may be done twice",
    "appended line": "results show that much later; some work may be done twice",
    "heartbeat": "a living worker seems silent for that long",
    "replaced file": "a changed budget is read that much later",
}


class Changes:
    """Files that one side changes as a run does: its open files stay open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        self._journal = JournalWriter(directory / "journal")
        self._journal.append(_BEFORE)
        self._journal.sync()
        files.write_new(directory / "replaced", [_BEFORE])
        me = Presence(
            worker="doctor", host=host_name(), boot=boot_id(), pid=os.getpid(), rank=0, job=None
        )
        self._heartbeat = PresenceFile(directory / "heartbeat", me)

    def make(self) -> None:
        self._heartbeat.update()
        self._journal.append(_AFTER)
        self._journal.sync()
        files.replace_file(self._directory / "replaced", [_AFTER])
        files.write_new(self._directory / "new", [_AFTER])


def looks(directory: Path) -> dict[str, Callable[[], bool]]:
    def reads(name: str, data: bytes) -> Callable[[], bool]:
        return lambda: files.read_fresh(directory / name) == data

    def beats() -> bool:
        presence = read_presence(directory / "heartbeat")
        return presence is not None and presence.heartbeat > 0

    return {
        "new file": reads("new", _AFTER),
        "directory": lambda: "new" in files.list_names(directory),
        "appended line": reads("journal", _BEFORE + _AFTER),
        "heartbeat": beats,
        "replaced file": reads("replaced", _AFTER),
    }


def measure_delays(pair: Pair) -> dict[str, float | None]:
    """Return the seconds from the request to the other side until each change was seen.

    They are upper bounds of the delays; None means longer than LIMIT_S after that side was
    done. All files are read before the changes, because caches hold only files that were read.
    """
    directory = pair.area / "views"
    pair.ask("prepare", name="views")
    waiting = looks(directory)
    for seen in waiting.values():
        seen()
    asked = time.monotonic()
    pair.ask("change")
    delays: dict[str, float | None] = dict.fromkeys(waiting)
    began = time.monotonic()
    while waiting and time.monotonic() - began < LIMIT_S:
        for name, seen in list(waiting.items()):
            if seen():
                delays[name] = round(time.monotonic() - asked, 3)
                del waiting[name]
        time.sleep(0.01 if time.monotonic() - began < 1 else 0.25)
    return delays


def judge_delay(name: str, delay: float | None) -> Finding:
    check = f"delay ({name})"
    if delay is None:
        means = "workers on two hosts would consider each other dead, or wait forever"
        fix = "ask the site how long clients cache files, or choose another directory"
        return Finding(check, Verdict.UNSAFE, f"not seen after {LIMIT_S:g} s", means, fix)
    found = f"seen within {format_duration(delay)}"
    fix = f"a --lease below {format_duration(2 * delay)} would end living workers' leases"
    fix = fix if name == "heartbeat" else ""
    return judged(check, found, Verdict.SLOWER, _DELAY_MEANS[name], fix, bad=delay > _PROMPT_S)


def check_writing(area: Path) -> Finding:
    """Write and sync files as a run does; report the time to put a line on disk."""
    files.write_new(area / "written", [_LINE])
    journal = JournalWriter(area / "synced")
    seconds: list[float] = []
    end = time.monotonic() + _SECONDS
    while len(seconds) < _MOST_SYNCS and time.monotonic() < end:
        began = time.monotonic()
        journal.append(_LINE)
        journal.sync()
        seconds.append(time.monotonic() - began)
    journal.close()
    files.sync_directory(area)
    typical, worst = statistics.median(seconds), max(seconds)
    found = f"no error; {1000 * typical:.3g} ms for a line on disk, at worst {1000 * worst:.3g} ms"
    means = f"a worker spends {format_duration(typical)} per half second of results on it"
    fix = "let an item be more work"
    return judged("fsync", found, Verdict.SLOWER, means, fix, bad=typical > _SLOW_SYNC_S)
