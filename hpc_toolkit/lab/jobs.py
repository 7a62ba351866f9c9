"""One job of a lab from its submission to its end, with its log as it grows."""

from __future__ import annotations

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
# Columns by width: whatever a name or a path holds, it stays in its column.
_FIELDS = (("JobArrayID", 48), ("State", 24), ("exit_code", 16), ("StdOut", 4096), ("StdErr", 4096))

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""States that a job does not leave again."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job, or one element of an array, as squeue(1) tells it."""

    id: str
    """``123``, or ``123_4`` of an array; ``123_[4-9]`` for elements that wait."""
    state: str
    """Slurm's word, such as RUNNING."""
    code: int
    """Of an ended job the code that a shell would have seen: of a signal 128 and its number, and
    never 0 unless it completed."""
    logs: tuple[Path, ...]
    """Standard output, and standard error where that is another file."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job, or an array, ended."""

    job: str
    state: str
    """Slurm's word; of an array that of the element with the highest code."""
    code: int
    seconds: float
    """From the submission on."""


def run_script(
    lab: Lab, script: Path, arguments: Sequence[str], show: Callable[[bytes], None]
) -> JobEnd:
    """Submit a script, hand its log to ``show`` piece by piece, and return when the job ended.

    A requeued job is followed until it ends for good. When this is interrupted, the job is
    cancelled.

    Raises:
        HpcToolkitError: sbatch refuses the script, or the lab goes down.
    """
    began = time.monotonic()
    # Made absolute, so that no name is taken for an option; what follows is the script's.
    job = lab.ask("sbatch", "--parsable", str(script.absolute()), *arguments).strip()
    job = job.partition(";")[0]
    read: dict[Path, int] = {}
    pause = _FIRST_PAUSE_S
    try:
        while True:
            records = job_records(lab, job)
            # The state was asked before the log is read: of an ended job nothing is missed.
            for log in dict.fromkeys(log for one in records for log in one.logs):
                read[log] = _show_more(log, read.get(log, 0), show)
            if records and all(one.state in ENDED for one in records):
                worst = max(records, key=lambda one: one.code)
                return JobEnd(job, worst.state, worst.code, time.monotonic() - began)
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_S)
    except BaseException:
        lab.ask("scancel", "--quiet", job)
        raise


def job_records(lab: Lab, job: str) -> list[JobRecord]:
    """A job, or every element of an array, as Slurm sees it now.

    Raises:
        HpcToolkitError: Slurm knows no such job; it forgets a job 5 minutes after its end.
    """
    columns = ",".join(f"{name}:{width}" for name, width in _FIELDS)
    text = lab.ask("squeue", "--noheader", "--array", "--states=all", "--jobs", job, "-O", columns)
    return parse_records(text)


def parse_records(text: str) -> list[JobRecord]:
    """The jobs in what squeue prints for job_records()."""
    return [_record(line.encode()) for line in text.splitlines() if line.strip()]


def _record(line: bytes) -> JobRecord:
    fields, begin = [], 0
    for _, width in _FIELDS:
        # By bytes, as squeue fills its columns.
        fields.append(line[begin : begin + width].decode(errors="replace").strip())
        begin += width
    job, state, raw, *logs = fields
    try:
        status = int(raw)
    except ValueError:
        message = f"squeue tells of job {job} what is not understood: {raw!r}"
        raise HpcToolkitError(message) from None
    signal, code = status & 127, status >> 8
    code = 128 + signal if signal else code
    if state != "COMPLETED" and state in ENDED:
        code = code or 1
    paths = dict.fromkeys(Path(_expanded(log, job)) for log in logs if log not in ("", "/dev/null"))
    return JobRecord(job, state, code, tuple(paths))


def _expanded(log: str, job: str) -> str:
    """A log's name with what squeue leaves open in it: of an array its id and the element's."""
    array, _, element = job.partition("_")
    return log.replace("%A", array).replace("%a", element) if element else log


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
