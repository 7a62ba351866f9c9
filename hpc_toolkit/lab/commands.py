"""The programs of a lab, commands that run against it, and jobs that are followed to their end.

A command reaches no other Slurm, and is killed if it takes too long.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.lab.settings import LabPaths
from hpc_toolkit.lab.state import status_of
from hpc_toolkit.slurm.client import Finished, SlurmSilentError
from hpc_toolkit.slurm.client import run as run_program
from hpc_toolkit.slurm.records import SQUEUE_FIELDS, JobRecord, parse_job_id, parse_squeue

HOSTS = Path("/etc/hosts")
_ADMINISTRATORS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Directories of daemons, which are often not in an ordinary user's PATH."""

_SLURM = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "sinfo": "slurm-client",
    "scontrol": "slurm-client",
    "munged": "munge",
}
_SYSTEM = {
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_ACCOUNTING = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-client",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
}
# Packages of plugins: an installed program does not imply its plugins.
_WITH_SLURM = ("slurm-wlm-basic-plugins",)
_WITH_ACCOUNTING = ("slurm-wlm-mysql-plugin",)

CLIENTS = (
    "sacct", "sacctmgr", "salloc", "sattach", "sbatch", "sbcast", "scancel", "scontrol", "scrontab",
    "sdiag", "sinfo", "sprio", "squeue", "sreport", "srun", "sshare", "sstat", "strigger",
)  # fmt: skip
"""Slurm's commands for users."""

ANSWER_S = 30.0
"""Seconds for a query. Slurm's programs retry by themselves for about 10 s."""
# Variables of an outer Slurm, or options meant for it, would change commands for the lab.
_FOREIGN = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_",
    "SCONTROL_", "PMI_", "PMIX_",
)  # fmt: skip

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


def user_path() -> list[str]:
    """The directories in PATH, without those of labs: their scripts would enter another lab."""
    every = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return [one for one in every if not os.path.exists(f"{one}/../lab.json")]


def search_path() -> str:
    """PATH, followed by the directories of daemons."""
    return os.pathsep.join([*user_path(), *_ADMINISTRATORS])


def program(name: str, paths: LabPaths | None = None) -> str:
    """The path of a program, or of a lab's script that runs it; ConfigError if it is missing."""
    own = [str(paths.clients)] if paths is not None else []
    found = shutil.which(name, path=os.pathsep.join([*own, search_path()]))
    if found is None:
        message = f"{name} is not installed"
        raise ConfigError(message, hint="'hpctk lab up' says which packages are missing")
    return found


def missing_programs(*, accounting: bool, root: str = "") -> list[str]:
    """Programs that a lab lacks; those of Slurm are looked for in ``root``."""
    slurm = {**_SLURM, **(_ACCOUNTING if accounting else {})}
    path = search_path().split(os.pathsep)

    def is_there(name: str) -> bool:
        # A link in a root may be absolute, so that only a process in the root can follow it.
        where = root if name in slurm else ""
        return any(os.path.lexists(f"{where}{directory}/{name}") for directory in path)

    return [name for name in (*slurm, *_SYSTEM) if not is_there(name)]


def install_command(missing: list[str]) -> str:
    """The command that installs programs and their plugins on Debian and Ubuntu."""
    packages = {**_SLURM, **_SYSTEM, **_ACCOUNTING}
    wanted = [packages[name] for name in missing]
    if any(name in _SLURM for name in missing):
        wanted += _WITH_SLURM
    if any(name in _ACCOUNTING for name in missing):
        wanted += _WITH_ACCOUNTING
    return f"apt-get install --no-install-recommends {' '.join(dict.fromkeys(wanted))}"


def check_programs(*, accounting: bool, root: str = "") -> None:
    """Refuse to start without a program; the hint is the command that installs it."""
    missing = missing_programs(accounting=accounting, root=root)
    if missing:
        where = f"not in {root}" if root else "not installed"
        message = f"a lab needs programs that are {where}: {', '.join(missing)}"
        hint = f"on Debian and Ubuntu, as root: {install_command(missing)}"
        if root:
            hint = "--slurm takes a directory with usr, etc and an installed Slurm, or a release"
        raise ConfigError(message, hint=hint)
    # Minimal containers have none, and each node of a lab covers it with a file of its own.
    if not HOSTS.exists():
        message = f"a lab needs {HOSTS}, which this machine does not have"
        raise ConfigError(message, hint=f"as root: echo 127.0.0.1 localhost >{HOSTS}")


def environment(paths: LabPaths) -> dict[str, str]:
    own = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
    return {**own, "PATH": os.pathsep.join(user_path()), "SLURM_CONF": str(paths.slurm_conf)}


def finished(
    paths: LabPaths,
    *argv: str,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Finished:
    """Run a command to its end, by default a Slurm command against the lab.

    Kills its process group after ``limit_s``, by default 30 s, e.g. because a daemon is stopped.
    """
    given = environment(paths) if environ is None else environ
    words = [program(argv[0], paths), *argv[1:]]
    try:
        return run_program(words, timeout_s=limit_s or ANSWER_S, environ=given)
    except SlurmSilentError as error:
        message = error.message.replace(words[0], argv[0])
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}") from None


def ask(paths: LabPaths, *argv: str, limit_s: float | None = None) -> str:
    """Run a Slurm command against the lab and return its stdout."""
    done = finished(paths, *argv, limit_s=limit_s)
    if done.code != 0:
        message = " ".join(done.stderr.split()) or f"{argv[0]} failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return done.stdout


def node_states(paths: LabPaths) -> dict[str, str]:
    """Return the state of every node in sinfo's terms; {} while slurmctld does not answer."""
    try:
        text = ask(paths, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
    except HpcToolkitError:
        return {}
    return dict(line.split() for line in text.splitlines())


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
