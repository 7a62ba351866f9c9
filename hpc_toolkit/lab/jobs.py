"""Submit a job to a lab, follow it to its end, and show its log as it grows."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.members import status_of
from hpc_toolkit.lab.programs import ask, finished
from hpc_toolkit.slurm.records import SQUEUE_FIELDS, JobRecord, parse_job_id, parse_squeue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.lab.settings import LabPaths

_FIRST_PAUSE_S = 0.05
_PAUSE_S = 0.5
_QUESTIONS = 20
"""Consecutive failed queries after which a job is given up."""
_QUESTION_S = 5.0
"""Seconds per query: Slurm's programs look longer for a controller if the lab was taken down."""
_COLUMNS = ",".join(f"{name}:{width}" for name, width in SQUEUE_FIELDS)
_LOGS = re.compile(r" StdErr=(?P<err>.*?) StdIn=.*? StdOut=(?P<out>.*?)(?= [A-Z]\w*=|\s*$)")

_QUEUED_AGAIN = {"NODE_FAIL", "PREEMPTED"}
"""Ended states that a job may show for a moment before Slurm requeues it."""
_STANDS_S = 2.0
"""Seconds after which such a state is final."""
NO_LOG = 128 + 53
"""The code of a job whose log slurmstepd could not open: it reports "signal" 53."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job, or an array, ended."""

    job: str
    state: str
    """Slurm's state; for an array, that of the element with the highest code."""
    code: int
    """Exit code as a shell reports it: 128 plus the number of a signal; 0 only if the job
    completed."""
    seconds: float
    """Seconds since the submission."""


def run_script(
    paths: LabPaths,
    script: Path,
    arguments: Sequence[str],
    show: Callable[[bytes], None],
    tell: Callable[[str], None],
) -> JobEnd | None:
    """Submit a script, pass its log to ``show`` in pieces, and return when the job has ended.

    ``tell`` gets a line for the submission and for each reason why the job waits. A requeued job is
    followed until its final end. An interrupt cancels the job. Returns None if sbatch submitted no
    job, as for ``--test-only``; ``tell`` then gets the stderr of sbatch.
    """
    began = time.monotonic()
    job = ""
    # Ctrl-C while sbatch runs would leave a job whose id is not known.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            job, said = submit(paths, script, arguments)
        finally:
            # If Ctrl-C was pressed meanwhile, this raises KeyboardInterrupt.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if not job:
            tell(said)
            return None
        tell(f"job {job} submitted")
        worst = max(_follow(paths, job, show, tell), key=code_of)
    except BaseException:
        if job and status_of(paths).state != "down":
            with contextlib.suppress(HpcToolkitError):
                ask(paths, "scancel", "--quiet", job)
        raise
    return JobEnd(job, worst.state, code_of(worst), time.monotonic() - began)


def submit(paths: LabPaths, script: Path, arguments: Sequence[str]) -> tuple[str, str]:
    """Submit a script; return the job's id, "" without a job, and what sbatch wrote to stderr."""
    # Absolute, so that sbatch takes no script for an option; the arguments go to the script.
    try:
        done = finished(paths, "sbatch", "--parsable", str(script.absolute()), *arguments)
    except HpcToolkitError as error:
        hint = "the job may be queued: 'hpctk lab exec squeue' shows it, 'scancel' removes it"
        raise HpcToolkitError(error.message, hint=hint) from None
    if done.code != 0:
        message = " ".join(done.stderr.split()) or "sbatch failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    found = parse_job_id(done.stdout)
    return found[0] if found else "", done.stderr.strip()


def code_of(record: JobRecord) -> int:
    """The code that JobEnd has for a job; 0 while the job has not ended."""
    return record.exit_code or int(record.ended and record.state != "COMPLETED")


def _follow(
    paths: LabPaths, job: str, show: Callable[[bytes], None], tell: Callable[[str], None]
) -> list[JobRecord]:
    """Follow a job until its final end and return its last records."""
    offsets: dict[Path, int] = {}
    reason, since = "", math.inf
    for records, logs in _looks(paths, job):
        for log in logs:
            offsets[log] = _show_more(log, offsets.get(log, 0), show)
        waits = next((one.reason for one in records if one.waiting and one.reason), "")
        if waits and waits != reason:
            tell(f"job {job} waits: {waits}")
        reason = waits or reason
        if not records or not all(one.ended for one in records):
            since = math.inf
            continue
        since = min(since, time.monotonic())
        doubtful = any(one.state in _QUEUED_AGAIN for one in records)
        if not doubtful or time.monotonic() - since >= _STANDS_S:
            return records
    raise AssertionError  # _looks() ends only with an error


def _looks(paths: LabPaths, job: str) -> Iterator[tuple[list[JobRecord], list[Path]]]:
    """Query a job's records and its logs again and again; [] for both if a query fails."""
    pause, failed = _FIRST_PAUSE_S, 0
    while True:
        records: list[JobRecord] = []
        logs: list[Path] = []
        # Without their configuration Slurm's programs look for it for 60 s.
        if not paths.slurm_conf.exists():
            raise _went_down(paths, job)
        try:
            # Query the state before reading the log, so that the log of an ended job is complete.
            records, logs = job_records(paths, job), job_logs(paths, job)
            failed = 0
        except HpcToolkitError as error:
            # A controller that is busy or restarting leaves some queries unanswered.
            failed += 1
            if status_of(paths).state != "up":
                raise _went_down(paths, job) from error
            if failed == _QUESTIONS:
                raise
        yield records, logs
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S)


def _went_down(paths: LabPaths, job: str) -> HpcToolkitError:
    message = f"the lab in {paths.root} went down before job {job} ended"
    return HpcToolkitError(message, hint="start it again with 'hpctk lab up'")


def job_records(paths: LabPaths, job: str) -> list[JobRecord]:
    """Return the current record of a job, or of every element of an array.

    Slurm forgets a job 5 minutes after its end.
    """
    argv = ("squeue", "--noheader", "--array", "--states=all", "--jobs", job)
    records = parse_squeue(ask(paths, *argv, "--Format", _COLUMNS, limit_s=_QUESTION_S).encode())
    if not records:
        message = f"squeue does not list job {job}"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return records


def job_logs(paths: LabPaths, job: str) -> list[Path]:
    """Return the files of stdout and stderr of a job, or of all elements of an array."""
    argv = ("scontrol", "show", "job", "--oneliner", job)
    return parse_logs(ask(paths, *argv, limit_s=_QUESTION_S))


def parse_logs(text: str) -> list[Path]:
    """Parse scontrol's output into log files, in its order, without duplicates."""
    found: dict[Path, None] = {}
    for line in text.splitlines():
        # The user's names and comments come before these fields and may contain any text.
        match = _LOGS.search(line[max(line.rfind(" StdErr="), 0) :])
        names = (match["out"], match["err"]) if match else ()
        found.update((Path(name), None) for name in names if name not in ("", "/dev/null"))
    return list(found)


def _show_more(log: Path, offset: int, show: Callable[[bytes], None]) -> int:
    """Show a log from ``offset`` on; return the offset of its end.

    A log that has become shorter was truncated by a restart of the job, and is shown again.
    """
    try:
        with log.open("rb") as file:
            file.seek(0 if offset > file.seek(0, os.SEEK_END) else offset)
            data = file.read()
            offset = file.tell()
    except OSError:
        return offset
    if data:
        show(data)
    return offset
