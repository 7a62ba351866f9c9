"""Submit a job to a lab, follow it to its end, and show its log as it grows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab import clients
from hpc_toolkit.lab.clients import ask, environment
from hpc_toolkit.lab.packages import program
from hpc_toolkit.slurm.records import SQUEUE_FIELDS, JobRecord, parse_job_id, parse_squeue
from hpc_toolkit.system.processes import interrupts_held, kill_group, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.lab.lab import Lab
    from hpc_toolkit.lab.settings import LabPaths

_FIRST_PAUSE_S = 0.05
_PAUSE_S = 0.5
_QUESTIONS = 20
"""Consecutive failed queries after which a job is given up."""
_QUESTION_S = 5.0
"""Seconds per query: Slurm's programs look longer for a controller if the lab was taken down."""
_STANDS_S = 2.0
_COLUMNS = ",".join(f"{name}:{width}" for name, width in SQUEUE_FIELDS)
_LOGS = re.compile(r" StdErr=(?P<err>.*?) StdIn=.*? StdOut=(?P<out>.*?)(?= [A-Z]\w*=|\s*$)")
_TAIL_BYTES = 4096

_QUEUED_AGAIN = {"NODE_FAIL", "PREEMPTED"}
"""Ended states that a job may show for a moment before Slurm requeues it."""
_NO_LOG = 128 + 53
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

    @property
    def remark(self) -> str:
        """The meaning of a code that is not self-explanatory; else ""."""
        no_log = "its log could not be opened: does the directory of --output exist?"
        return no_log if self.code == _NO_LOG else ""


def run_script(
    lab: Lab,
    script: Path,
    arguments: Sequence[str],
    show: Callable[[bytes], None],
    tell: Callable[[str], None],
) -> JobEnd | None:
    """Submit a script, pass its log to ``show`` in pieces, and return when the job has ended.

    ``tell`` gets a line for the submission and for each reason why the job waits. A requeued job is
    followed until its final end. An interrupt cancels the job. Returns None if sbatch submitted no
    job, as for ``--test-only``; ``tell`` then gets the stderr of sbatch.

    Raises:
        HpcToolkitError: sbatch refuses the script, the lab is taken down, or its controller does
            not answer.
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
    """Return the code that JobEnd has for a job; 0 while the job has not ended."""
    return record.exit_code or int(record.ended and record.state != "COMPLETED")


def _follow(
    lab: Lab, job: str, show: Callable[[bytes], None], tell: Callable[[str], None]
) -> list[JobRecord]:
    """Follow a job until its final end and return its last records."""
    shown: dict[Path, _Shown] = {}
    looks, end, reason = _looks(lab, job), _End(), ""
    while True:
        records, logs = next(looks)
        restarts = sum(one.restarts or 0 for one in records)
        for log in logs:
            shown.setdefault(log, _Shown()).show_more(log, restarts, show)
        waits = next((one.reason for one in records if one.waiting and one.reason), "")
        if waits and waits != reason:
            tell(f"job {job} waits: {waits}")
        reason = waits or reason
        if end.is_final(records):
            return records


def _looks(lab: Lab, job: str) -> Iterator[tuple[list[JobRecord], list[Path]]]:
    """Query a job's records and its logs again and again; [] for both if a query fails."""
    pause, failed = _FIRST_PAUSE_S, 0
    while True:
        records: list[JobRecord] = []
        logs: list[Path] = []
        _check_there(lab, job)
        try:
            # Query the state before reading the log, so that the log of an ended job is complete.
            records, logs = job_records(lab, job), job_logs(lab, job)
            failed = 0
        except HpcToolkitError as error:
            # A controller that is busy or restarting leaves some queries unanswered.
            failed += 1
            if lab.status().state != "up":
                raise _went_down(lab, job) from error
            if failed == _QUESTIONS:
                raise
        yield records, logs
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_S)


@dataclass(slots=True)
class _End:
    """Decides whether a job has ended for good."""

    since: float | None = None
    """Monotonic time at which all elements of the job were first seen to have ended."""

    def is_final(self, records: list[JobRecord]) -> bool:
        """Return whether all have ended, and long enough ago where Slurm may requeue the job."""
        if not records or any(not one.ended for one in records):
            self.since = None
            return False
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        doubtful = any(one.state in _QUEUED_AGAIN for one in records)
        return not doubtful or now - self.since >= _STANDS_S


def _check_there(lab: Lab, job: str) -> None:
    """Check that the lab has its files: without them Slurm's programs look for them for 60 s.

    Raises:
        HpcToolkitError: the lab was taken down.
    """
    if not lab.paths.slurm_conf.exists():
        raise _went_down(lab, job)


def _went_down(lab: Lab, job: str) -> HpcToolkitError:
    message = f"the lab in {lab.paths.root} went down before job {job} ended"
    return HpcToolkitError(message, hint="start it again with 'hpctk lab up'")


def job_records(lab: Lab, job: str) -> list[JobRecord]:
    """Return the current record of a job, or of every element of an array.

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
    """Return the files of stdout and stderr of a job, or of all elements of an array.

    Raises:
        HpcToolkitError: Slurm knows no such job.
    """
    return parse_logs(lab.ask("scontrol", "show", "job", "--oneliner", job, limit_s=_QUESTION_S))


def parse_logs(text: str) -> list[Path]:
    """Parse scontrol's output for job_logs() into log files, in its order, without duplicates."""
    found: dict[Path, None] = {}
    for line in text.splitlines():
        # The user's names and comments come before these fields and may contain any text.
        match = _LOGS.search(line[max(line.rfind(" StdErr="), 0) :])
        names = (match["out"], match["err"]) if match else ()
        found.update((Path(name), None) for name in names if name not in ("", "/dev/null"))
    return list(found)


@dataclass(slots=True)
class _Shown:
    """The part of a log that was shown."""

    offset: int = 0
    tail: bytes = b""
    """The last bytes before the offset."""
    restarts: int = 0
    """The job's restarts when the log was last shown from its beginning."""

    def show_more(self, log: Path, restarts: int, show: Callable[[bytes], None]) -> None:
        """Show new data of the log, or all of it if a restart of the job truncated it."""
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
        # A truncated log may have grown beyond the offset; with --open-mode=append it goes on.
        file.seek(self.offset - len(self.tail))
        return file.read(len(self.tail)) != self.tail


@dataclass(frozen=True, slots=True)
class Submission:
    """The result of sbatch for a script that it did not refuse."""

    job: str
    """The job's id; "" if sbatch submitted none, as for ``--test-only``."""
    said: str
    """The stderr of sbatch so far."""


def submit(paths: LabPaths, script: Path, arguments: Sequence[str]) -> Submission:
    """Submit a script with its arguments, and return as soon as the job has an id.

    ``#SBATCH --wait`` has no effect: sbatch is killed once it has printed the id. An interrupt
    cancels a job that was submitted by then.

    Raises:
        HpcToolkitError: sbatch refuses the script, or does not answer within 30 s.
    """
    # Absolute, so that sbatch takes no script for an option; the arguments go to the script.
    argv = [program("sbatch"), "--parsable", str(script.absolute()), *arguments]
    # A terminal: to a pipe sbatch would write the id when it ends, which is too late with --wait.
    terminal, end = os.openpty()
    with open(terminal, "rb", buffering=0), tempfile.TemporaryFile() as errors:
        with interrupts_held() as let_go:
            with open(end, "wb", buffering=0) as stdout:
                child = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=errors,
                    env=environment(paths),
                    process_group=0,
                )
            with child:
                try:
                    job = _interruptible_number(paths, terminal, let_go)
                    code = 0 if job else child.wait(clients.ANSWER_S)
                finally:
                    if child.poll() is None:
                        kill_group(child.pid)
        errors.seek(0)
        said = errors.read().decode(errors="replace").strip()
    if code != 0:
        message = " ".join(said.split()) or "sbatch failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return Submission(job, said)


def _interruptible_number(paths: LabPaths, terminal: int, let_go: Callable[[], None]) -> str:
    printed = bytearray()
    try:
        let_go()
        return _number(paths, terminal, printed)
    except KeyboardInterrupt:
        # The controller may have the request already, so wait for the id and cancel that job.
        with contextlib.suppress(HpcToolkitError):
            if job := _number(paths, terminal, printed):
                ask(paths, "scancel", "--quiet", job)
        raise


def _number(paths: LabPaths, terminal: int, printed: bytearray) -> str:
    """Read the job's id from the terminal; "" if sbatch ended without one.

    ``printed`` is the output that has been read so far.
    """
    until = time.monotonic() + clients.ANSWER_S
    while not (found := parse_job_id(printed.decode(errors="replace").rpartition("\n")[0])):
        if not readable(terminal, timeout_s=max(0.0, until - time.monotonic())):
            message = f"sbatch did not answer within {clients.ANSWER_S:.3g} s"
            hint = f"the job may be queued all the same; the lab's logs are in {paths.logs}"
            raise HpcToolkitError(message, hint=hint)
        try:
            printed += os.read(terminal, 4096)
        except OSError:
            return ""  # A terminal whose other end is closed: ioctl_tty(2).
    return found[0]
