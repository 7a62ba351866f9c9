"""Measure the cost of writing small files, and results that must be on disk."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 1.0
_MOST_FILES = 1000
_MOST_SYNCS = 50
_FEW_PER_S = 100.0
_SLOW_SYNC_S = 0.1
_LINE = b"x" * 199 + b"\n"


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
    slow = typical > _SLOW_SYNC_S
    return Finding(
        check="fsync",
        verdict=Verdict.SLOWER if slow else Verdict.FINE,
        found=f"no error; {format_ms(typical)} for a line on disk, at worst {format_ms(worst)}",
        means=f"a worker spends {format_duration(typical)} per half second of results on it"
        if slow
        else "",
        fix="let an item be more work" if slow else "",
    )


def check_small_files(area: Path) -> Finding:
    """Measure how fast one process creates and closes empty files in one directory."""
    directory = area / "many"
    directory.mkdir()
    began = time.monotonic()
    count = 0
    while count < _MOST_FILES and time.monotonic() - began < _SECONDS:
        os.close(os.open(directory / str(count), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        count += 1
    rate = count / max(time.monotonic() - began, 1e-6)
    slow = rate < _FEW_PER_S
    return Finding(
        check="small files",
        verdict=Verdict.SLOWER if slow else Verdict.FINE,
        found=f"{rate:.0f} created in a second by one process",
        means="claims, one for up to 256 items, take their time" if slow else "",
        fix="group items, or let an item be more work" if slow else "",
    )


def format_ms(seconds: float) -> str:
    """Format seconds as milliseconds with three significant digits: "0.08 ms"."""
    return f"{seconds * 1000:.3g} ms"
