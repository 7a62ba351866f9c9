"""Measure how late one side sees changes of the other, and how fast this side writes files."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict, judged
from hpc_toolkit.queue.presence import Presence, PresenceFile, read_presence
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.ranks import boot_id, host_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.doctor.sides import Pair

LIMIT_S = 65.0
"""Longer than 60 s, for which NFS caches a directory by default (acdirmax in nfs(5))."""
_PROMPT_S = 5.0
_BEFORE, _AFTER = b"0" * 64, b"1" * 64
_SECONDS = 1.0
_MOST_SYNCS = 50
_SLOW_SYNC_S = 0.1
_LINE = b"x" * 199 + b"\n"
_MEANS = {
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
        """Make all changes at once."""
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


def check_views(pair: Pair) -> tuple[list[Finding], dict[str, float | None]]:
    delays = measure_delays(pair)
    return [_judge(name, delay) for name, delay in delays.items()], delays


def _judge(name: str, delay: float | None) -> Finding:
    check = f"delay ({name})"
    if delay is None:
        means = "workers on two hosts would consider each other dead, or wait forever"
        fix = "ask the site how long clients cache files, or choose another directory"
        return Finding(check, Verdict.UNSAFE, f"not seen after {LIMIT_S:g} s", means, fix)
    found = f"seen within {format_duration(delay)}"
    fix = f"a --lease below {format_duration(2 * delay)} would end living workers' leases"
    fix = fix if name == "heartbeat" else ""
    return judged(check, found, Verdict.SLOWER, _MEANS[name], fix, bad=delay > _PROMPT_S)


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
    found = f"no error; {format_ms(typical)} for a line on disk, at worst {format_ms(worst)}"
    means = f"a worker spends {format_duration(typical)} per half second of results on it"
    fix = "let an item be more work"
    return judged("fsync", found, Verdict.SLOWER, means, fix, bad=typical > _SLOW_SYNC_S)


def format_ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"
