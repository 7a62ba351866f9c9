"""One job of a lab from its submission to its end, with its log as it grows."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_toolkit.lab.lab import Lab

_FIRST_PAUSE_S = 0.05
_PAUSE_S = 0.5
ENDED = {
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    "DEADLINE", "OUT_OF_MEMORY", "REVOKED",
}  # fmt: skip
"""States that a job does not leave again."""

# scontrol's one line per record: KEY=VALUE, where values may hold spaces but keys begin large.
_FIELD = {
    key: re.compile(rf"(?:^| ){key}=(.*?)(?= [A-Z][A-Za-z:/]*=|\s*$)")
    for key in ("JobState", "ExitCode", "StdOut", "StdErr")
}


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    job: str
    state: str
    """Slurm's word, such as COMPLETED; the worst one of an array."""
    code: int
    """The exit code that a shell would have seen: of a signal 128 and its number, and never 0
    for a job that Slurm ended."""
    seconds: float
    """From the submission on."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, or one task of an array, as scontrol tells it."""

    state: str
    code: int
    logs: tuple[Path, ...]


def run_script(
    lab: Lab, script: Path, arguments: Sequence[str], show: Callable[[bytes], None]
) -> JobEnd:
    """Submit a script, hand its log to ``show`` piece by piece, and return when the job ended.

    A requeued job is followed until it ends for good. When this is interrupted, the job is
    cancelled.

    Raises:
        HpcToolkitError: sbatch refuses the script.
    """
    began = time.monotonic()
    # Behind "--" or not, sbatch takes all that follows the script as the script's.
    job = lab.ask("sbatch", "--parsable", str(script), *arguments).strip().partition(";")[0]
    read: dict[Path, int] = {}
    pause = _FIRST_PAUSE_S
    try:
        while True:
            records = parse_records(lab.ask("scontrol", "show", "job", "-o", job))
            for log in dict.fromkeys(log for one in records for log in one.logs):
                read[log] = _show_more(log, read.get(log, 0), show)
            if records and all(one.state in ENDED for one in records):
                worst = max(records, key=lambda one: one.code)
                return JobEnd(job, worst.state, worst.code, time.monotonic() - began)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
    except BaseException:
        lab.ask("scancel", job)
        raise


def parse_records(text: str) -> list[JobRecord]:
    """The jobs in what ``scontrol show job -o`` prints."""
    return [_record(line) for line in text.splitlines() if line.strip()]


def _record(line: str) -> JobRecord:
    found = {key: match[1] for key, pattern in _FIELD.items() if (match := pattern.search(line))}
    try:
        code, _, number = found["ExitCode"].partition(":")
        status = 128 + int(number) if int(number) else int(code)
        state = found["JobState"]
    except (KeyError, ValueError):
        message = f"scontrol tells of a job what is not understood: {line[:200]}"
        raise HpcToolkitError(message) from None
    names = (found.get(key) for key in ("StdOut", "StdErr"))
    logs = tuple(dict.fromkeys(Path(name) for name in names if name and name != "/dev/null"))
    return JobRecord(state, status or int(state not in ("COMPLETED", "RUNNING")), logs)


def _show_more(log: Path, offset: int, show: Callable[[bytes], None]) -> int:
    """Show what a log has grown by; the new offset."""
    try:
        with log.open("rb") as file:
            if offset > file.seek(0, 2):
                offset = 0  # Another attempt of the job began the file anew.
            file.seek(offset)
            data = file.read()
    except OSError:
        return offset
    if data:
        show(data)
    return offset + len(data)
