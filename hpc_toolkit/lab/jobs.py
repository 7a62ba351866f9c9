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
_QUESTIONS = 20
"""That go without an answer, one after the other, before a job is given up."""
_STANDS_S = 2.0
_COLUMNS = "JobArrayID:48,State:24,exit_code:16"
_LOGS = re.compile(r" StdErr=(?P<err>.*?) StdIn=.*? StdOut=(?P<out>.*?)(?= [A-Z]\w*=|\s*$)")

ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "TIMEOUT"),
}
"""States of a job that has ended."""

_QUEUED_AGAIN = {"NODE_FAIL", "PREEMPTED"}
"""Those in which a job is seen for a moment that Slurm then queues again."""


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
        HpcToolkitError: sbatch refuses the script, the lab goes down, or its controller stays
            silent.
    """
    began = time.monotonic()
    # Made absolute, so that no name is taken for an option; what follows is the script's.
    job = lab.ask("sbatch", "--parsable", str(script.absolute()), *arguments).strip()
    job = job.partition(";")[0]
    try:
        worst = max(_follow(lab, job, show), key=lambda one: one.code)
    except BaseException:
        lab.ask("scancel", "--quiet", job)
        raise
    return JobEnd(job, worst.state, worst.code, time.monotonic() - began)


def _follow(lab: Lab, job: str, show: Callable[[bytes], None]) -> list[JobRecord]:
    """The last records of a job, once it has ended for good."""
    read: dict[Path, int] = {}
    pause, failed, ended_since = _FIRST_PAUSE_S, 0, None
    while True:
        try:
            # The state is asked before the log is read: of an ended job nothing is missed.
            records, logs = job_records(lab, job), job_logs(lab, job)
            failed = 0
        except HpcToolkitError:
            # A controller that is busy, or starts again, misses some questions.
            failed += 1
            if failed == _QUESTIONS or lab.status().state != "up":
                raise
            records, logs = [], []
        for log in logs:
            read[log] = _show_more(log, read.get(log, 0), show)
        if not records or any(one.state not in ENDED for one in records):
            ended_since = None
        else:
            now = time.monotonic()
            ended_since = now if ended_since is None else ended_since
            doubtful = any(one.state in _QUEUED_AGAIN for one in records)
            if not doubtful or now - ended_since >= _STANDS_S:
                return records
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S)


def job_records(lab: Lab, job: str) -> list[JobRecord]:
    """A job, or every element of an array, as Slurm sees it now.

    Raises:
        HpcToolkitError: Slurm knows no such job; it forgets a job 5 minutes after its end.
    """
    argv = ("squeue", "--noheader", "--array", "--states=all", "--jobs", job)
    return parse_records(lab.ask(*argv, "--Format", _COLUMNS))


def parse_records(text: str) -> list[JobRecord]:
    """The jobs in what squeue prints for job_records()."""
    return [_record(line) for line in text.splitlines() if line.strip()]


def job_logs(lab: Lab, job: str) -> list[Path]:
    """The files of standard output and standard error, of all elements of an array.

    Raises:
        HpcToolkitError: Slurm knows no such job.
    """
    return parse_logs(lab.ask("scontrol", "show", "job", "--oneliner", job))


def parse_logs(text: str) -> list[Path]:
    """The log files in what scontrol prints for job_logs(), each once, in its order."""
    found: dict[Path, None] = {}
    for line in text.splitlines():
        # Names and remarks of the user, which may hold anything, come before.
        match = _LOGS.search(line[max(line.rfind(" StdErr="), 0) :])
        names = (match["out"], match["err"]) if match else ()
        found.update((Path(name), None) for name in names if name != "/dev/null")
    return list(found)


def _record(line: str) -> JobRecord:
    try:
        job, state, raw = line.split()
        status = int(raw)
    except ValueError:
        message = f"squeue tells of a job what is not understood: {line.strip()!r}"
        raise HpcToolkitError(message) from None
    signal, code = status & 127, status >> 8
    code = 128 + signal if signal else code
    if state != "COMPLETED" and state in ENDED:
        code = code or 1
    return JobRecord(job, state, code)


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
