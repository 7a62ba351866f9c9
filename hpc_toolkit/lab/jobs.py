"""One job of a lab from its submission to its end, with its log as it grows."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.submission import submit
from hpc_toolkit.slurm.records import SQUEUE_FIELDS, JobRecord, parse_squeue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_toolkit.lab.lab import Lab

_FIRST_PAUSE_S = 0.05
_PAUSE_S = 0.5
_QUESTIONS = 20
"""That go without an answer, one after the other, before a job is given up."""
_QUESTION_S = 5.0
"""Slurm's programs look longer for a controller that is gone, with the lab that was taken down."""
_STANDS_S = 2.0
_COLUMNS = ",".join(f"{name}:{width}" for name, width in SQUEUE_FIELDS)
_LOGS = re.compile(r" StdErr=(?P<err>.*?) StdIn=.*? StdOut=(?P<out>.*?)(?= [A-Z]\w*=|\s*$)")
_TAIL_BYTES = 4096

_QUEUED_AGAIN = {"NODE_FAIL", "PREEMPTED"}
"""States in which a job is seen for a moment that Slurm then queues again."""
_NO_LOG = 128 + 53
"""The code of a job whose log slurmstepd could not open: it ends it by "signal" 53."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job, or an array, ended."""

    job: str
    state: str
    """Slurm's word; of an array that of the element with the highest code."""
    code: int
    """The code that a shell would have seen: of a signal 128 and its number, and never 0 unless
    the job completed."""
    seconds: float
    """From the submission on."""

    @property
    def remark(self) -> str:
        """What the code means where it does not speak for itself; or ""."""
        no_log = "its log could not be opened: does the directory of --output exist?"
        return no_log if self.code == _NO_LOG else ""


def run_script(
    lab: Lab,
    script: Path,
    arguments: Sequence[str],
    show: Callable[[bytes], None],
    tell: Callable[[str], None],
) -> JobEnd | None:
    """Submit a script, hand its log to ``show`` piece by piece, and return when the job ended.

    ``tell`` gets a line for the submission and for each reason for which the job waits. A requeued
    job is followed until it ends for good. When this is interrupted, the job is cancelled. None
    where sbatch submitted no job, as for ``--test-only``: then ``tell`` gets what it said.

    Raises:
        HpcToolkitError: sbatch refuses the script, the lab is taken down, or its controller stays
            silent.
    """
    began = time.monotonic()
    submission = submit(lab.paths, script, arguments)
    job = submission.job
    if not job:
        tell(submission.said)
        return None
    try:
        tell(f"job {job} submitted")
        worst = max(_follow(lab, job, show, tell), key=code_of)
    except BaseException:
        if lab.status().state != "down":
            with contextlib.suppress(HpcToolkitError):
                lab.ask("scancel", "--quiet", job)
        raise
    return JobEnd(job, worst.state, code_of(worst), time.monotonic() - began)


def code_of(record: JobRecord) -> int:
    """The code of a job's end, as JobEnd has it; 0 while it has none."""
    return record.exit_code or int(record.ended and record.state != "COMPLETED")


def _follow(
    lab: Lab, job: str, show: Callable[[bytes], None], tell: Callable[[str], None]
) -> list[JobRecord]:
    """The last records of a job, once it has ended for good."""
    shown: dict[Path, _Shown] = {}
    pause, failed, ended_since, reason = _FIRST_PAUSE_S, 0, None, ""
    while True:
        try:
            _check_there(lab, job)
            # The state is asked before the log is read: of an ended job nothing is missed.
            records, logs = job_records(lab, job), job_logs(lab, job)
            failed = 0
        except HpcToolkitError:
            # A controller that is busy, or starts again, misses some questions.
            failed += 1
            _check_there(lab, job)
            if failed == _QUESTIONS or lab.status().state != "up":
                raise
            records, logs = [], []
        restarts = sum(one.restarts or 0 for one in records)
        for log in logs:
            shown.setdefault(log, _Shown()).show_more(log, restarts, show)
        waits = next((one.reason for one in records if one.waiting and one.reason), "")
        if waits and waits != reason:
            tell(f"job {job} waits: {waits}")
        reason = waits or reason
        if not records or any(not one.ended for one in records):
            ended_since = None
        else:
            now = time.monotonic()
            ended_since = now if ended_since is None else ended_since
            doubtful = any(one.state in _QUEUED_AGAIN for one in records)
            if not doubtful or now - ended_since >= _STANDS_S:
                return records
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S)


def _check_there(lab: Lab, job: str) -> None:
    """Return if the lab still has its files.

    Raises:
        HpcToolkitError: it was taken down. Slurm's programs would look for a slurm.conf for 60 s.
    """
    if not lab.paths.slurm_conf.exists():
        message = f"the lab in {lab.paths.root} was taken down before job {job} ended"
        raise HpcToolkitError(message, hint="start it again with 'hpctk lab up'")


def job_records(lab: Lab, job: str) -> list[JobRecord]:
    """A job, or every element of an array, as Slurm sees it now.

    Raises:
        HpcToolkitError: Slurm knows no such job; it forgets a job 5 minutes after its end.
    """
    argv = ("squeue", "--noheader", "--array", "--states=all", "--jobs", job)
    records = parse_squeue(lab.ask(*argv, "--Format", _COLUMNS, limit_s=_QUESTION_S).encode())
    if not records:
        message = f"squeue tells nothing of job {job}"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {lab.paths.logs}")
    return records


def job_logs(lab: Lab, job: str) -> list[Path]:
    """The files of standard output and standard error, of all elements of an array.

    Raises:
        HpcToolkitError: Slurm knows no such job.
    """
    return parse_logs(lab.ask("scontrol", "show", "job", "--oneliner", job, limit_s=_QUESTION_S))


def parse_logs(text: str) -> list[Path]:
    """The log files in what scontrol prints for job_logs(), each once, in its order."""
    found: dict[Path, None] = {}
    for line in text.splitlines():
        # Names and remarks of the user, which may hold anything, come before.
        match = _LOGS.search(line[max(line.rfind(" StdErr="), 0) :])
        names = (match["out"], match["err"]) if match else ()
        found.update((Path(name), None) for name in names if name not in ("", "/dev/null"))
    return list(found)


@dataclass(slots=True)
class _Shown:
    """What of a log was shown."""

    offset: int = 0
    tail: bytes = b""
    """The last bytes before the offset."""
    restarts: int = 0
    """Of the job, when the log was last shown from its beginning."""

    def show_more(self, log: Path, restarts: int, show: Callable[[bytes], None]) -> None:
        """Show what the log has grown by, or all of it where another attempt began it anew."""
        try:
            with log.open("rb") as file:
                if self._is_another(file, restarts):
                    self.offset, self.tail, self.restarts = 0, b"", restarts
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return
        if data:
            show(data)
        self.offset += len(data)
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def _is_another(self, file: BinaryIO, restarts: int) -> bool:
        if self.offset > file.seek(0, 2):
            return True
        if restarts == self.restarts:
            return False  # A job may write anywhere into its own log.
        # By now it may have become longer than it was; but with --open-mode=append it goes on.
        file.seek(self.offset - len(self.tail))
        return file.read(len(self.tail)) != self.tail
