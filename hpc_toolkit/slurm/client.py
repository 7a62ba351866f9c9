"""The only client of Slurm's programs: argument lists out, records in.

Whatever Slurm does not say, or not in time, is unknown: nothing here takes silence for a failure.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.records import (
    SACCT_FIELDS,
    SQUEUE_FIELDS,
    UNKNOWN,
    JobRecord,
    by_id,
    job_id,
    parse_job_id,
    parse_sacct,
    parse_squeue,
)
from hpc_toolkit.system.processes import kill_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

ASK_S = 5.0
"""Seconds after which a question goes without an answer."""
SUBMIT_S = 120.0
"""Seconds that sbatch may take; it tries again by itself while the controller is busy."""

_DAY_S = 86400.0
_LEAST_S = 0.05
_AT_ONCE = 1000
"""Ids in one command: the kernel takes 128 KiB in one argument (execve(2))."""

_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
_OF_A_JOB = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI"),
    *("HPCTK_DEADLINE", "HPCTK_ARRAY_INDEX", "HPCTK_HOST"),
)
# What would change the columns, the order or the rows of an answer.
_OF_A_QUESTION = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_", "SLURM_BITSTR_LEN")
# Causes that Slurm's words for a refusal leave out.
_REFUSALS = {
    "Job dependency problem": "Slurm 23.02 and newer refuse to wait for a job that ended more than"
    " MinJobAge seconds ago or does not exist: correct --dependency, or leave it out"
}


class SlurmError(HpcToolkitError):
    """A program of Slurm is missing, did not answer in time, or refused."""


class SlurmUnsureError(SlurmError):
    """A program of Slurm may have done what it was asked to do: once more could be twice."""


class SlurmSilentError(SlurmUnsureError):
    """A program of Slurm did not answer in time."""

    exit_code = 75


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program said."""

    code: int
    """Exit code; negative for a signal."""
    stdout: str
    stderr: str
    raw: bytes = b""
    """stdout before it was decoded: Slurm's columns are so many bytes wide."""


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run one program of Slurm to its end.

    It answers in the C locale and with times in epoch seconds, unless ``environ`` is given, which
    it then gets as it is: sbatch passes all of it on to the job.

    Raises:
        SlurmSilentError: it did not finish within ``timeout_s`` seconds; it is then killed, with
            all that it started.
        SlurmError: it cannot be started.
    """
    given = _asking() if environ is None else dict(environ)
    # Files, not pipes: sites wrap these programs, and what a wrapper leaves behind would keep a
    # pipe open after the program said all that it had to say.
    with _scratch("stdout") as out, _scratch("stderr") as err:
        try:
            # A group of its own, so that nothing of it is left where it must be killed.
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=given,
                cwd=cwd,
                process_group=0,
            )
        except OSError as error:
            message = f"cannot run {argv[0]}: {error.strerror}"
            missing = error.errno == errno.ENOENT
            hint = "is Slurm installed here, and on your PATH?" if missing else ""
            raise SlurmError(message, hint=hint) from error
        with child:
            try:
                code = child.wait(timeout_s)
            except BaseException as error:
                kill_group(child.pid)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                message = f"{argv[0]} did not answer within {round(timeout_s, 1):g} s"
                hint = "is the controller up? 'scontrol ping' asks it"
                raise SlurmSilentError(message, hint=hint) from None
        said = _written(out)
        return Finished(code, _text(said), _text(_written(err)), raw=said)


def _scratch(name: str) -> BinaryIO:
    # In memory: a full disk must not keep anybody from asking.
    return os.fdopen(os.memfd_create(name), "w+b")


def _written(file: BinaryIO) -> bytes:
    # What was left behind may still write, at the place that both share.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _asking() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_OF_A_QUESTION)
    }
    return {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


def ask(argv: Sequence[str], *, timeout_s: float = ASK_S) -> str:
    """The stdout of a program that must succeed.

    Raises:
        SlurmError: with what was run and what it said.
    """
    done = run(argv, timeout_s=timeout_s)
    if done.code:
        raise failure(argv, done)
    return done.stdout


def failure(argv: Sequence[str], done: Finished) -> SlurmError:
    """The error for a program that failed: its words, and the command."""
    import shlex

    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    words = "; ".join(said[:5]) or f"exit code {done.code}"
    hints = [hint for what, hint in _REFUSALS.items() if what in words]
    hint = "; ".join([*hints, f"the command was: {shlex.join(argv)}"])
    return SlurmError(f"{argv[0]}: {words}", hint=hint)


def squeue(
    ids: Iterable[str], *, cluster: str = "", timeout_s: float = ASK_S
) -> dict[str, JobRecord]:
    """The jobs that the queue still knows, by the ids asked for; one call for each thousand.

    Slurm forgets a job some minutes after its end (MinJobAge); an id that is gone has no entry.

    Raises:
        SlurmError: no answer.
    """
    until = time.monotonic() + timeout_s
    columns = ",".join(f"{name}:{width}" for name, width in SQUEUE_FIELDS)
    argv = ["squeue", *_on(cluster), "--noheader", "--array", "--states=all"]
    found: dict[str, JobRecord] = {}
    for some in _pieces(_checked(ids)):
        asked = [*argv, f"--jobs={_bases(some)}", f"--Format={columns}"]
        done = run(asked, timeout_s=max(_LEAST_S, until - time.monotonic()))
        # Where one id is asked for and gone, that is an error; of several the others are listed.
        if done.code and "Invalid job id" not in done.stderr:
            raise failure(asked, done)
        found |= by_id(parse_squeue(done.raw), some)
    return found


def sacct(
    ids: Iterable[str], *, cluster: str = "", since: float | None = None, timeout_s: float = ASK_S
) -> dict[str, JobRecord]:
    """The jobs that the accounting knows, by the ids asked for; one call for each thousand.

    It may lag by seconds behind the queue. None are known where the site keeps no accounting.

    Args:
        ids: of jobs.
        cluster: "" for this one.
        since: epoch seconds of the earliest submission: jobs that ended a day or more before it
            are others of the same id; None: 30 days ago.
        timeout_s: how long to wait, in seconds.

    Raises:
        SlurmError: no answer.
    """
    until = time.monotonic() + timeout_s
    argv = ["sacct", *_on(cluster), "--noheader", "--parsable2", "--allocations", "--duplicates"]
    # Without a start some versions look at today only; from 1970 on, a large site's takes minutes.
    start = "now-30days"
    if since is not None:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(0.0, since - _DAY_S)))
    argv += [f"--starttime={start}", f"--format={','.join(SACCT_FIELDS)}"]
    found: dict[str, JobRecord] = {}
    for some in _pieces(_checked(ids)):
        asked = [*argv, f"--jobs={_bases(some)}"]
        done = run(asked, timeout_s=max(_LEAST_S, until - time.monotonic()))
        if done.code and "accounting storage is disabled" not in done.stderr:
            raise failure(asked, done)
        found |= by_id(parse_sacct(done.stdout), some)
    return found


def job_states(
    ids: Iterable[str], *, cluster: str = "", since: float | None = None, timeout_s: float = ASK_S
) -> dict[str, JobRecord]:
    """One record for every id: of the queue, else of the accounting, else ``unknown``.

    ``since`` as for :func:`sacct`.

    Never raises for what Slurm does or is not, and takes ``timeout_s`` seconds at most. The
    ``reason`` of an unknown job says why.
    """
    until = time.monotonic() + timeout_s
    wanted = list(dict.fromkeys(ids))
    found: dict[str, JobRecord] = {}
    why = "no time was left to ask Slurm"
    answered = False
    if timeout_s >= _LEAST_S:
        try:
            found = squeue(wanted, cluster=cluster, timeout_s=timeout_s)
            answered = True
            why = "the queue does not know it, and no time was left to ask the accounting"
        except SlurmError as error:
            why = error.message
    missing = [one for one in wanted if one not in found]
    left_s = until - time.monotonic()
    if missing and left_s >= _LEAST_S:
        try:
            found |= sacct(missing, cluster=cluster, since=since, timeout_s=left_s)
        except SlurmError as error:
            why = f"the queue does not know it, and {error.message}" if answered else why
        else:
            why = "neither the queue nor the accounting knows it" if answered else why
    return {one: found.get(one) or JobRecord(id=one, state=UNKNOWN, reason=why) for one in wanted}


def sbatch_argv(
    script: Path, arguments: Sequence[str] = (), *, options: Sequence[str] = ()
) -> list[str]:
    """The command that submits ``script``, an absolute path, with its arguments."""
    return ["sbatch", "--parsable", *options, str(script), *arguments]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job that sbatch submitted."""

    job: str
    """Its id."""
    cluster: str
    """The cluster that sbatch named, or ""."""
    said: tuple[str, ...] = ()
    """What sbatch and the site's filters wrote to stderr, a line each."""


def sbatch(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Accepted:
    """Submit by a command of :func:`sbatch_argv`.

    Args:
        argv: the command.
        environ: what sbatch passes on to the job; by default :func:`clean_environment`.
        cwd: the directory of submission; by default this one.

    Raises:
        SlurmUnsureError: sbatch did not answer, or not as it should: the job may be queued.
        SlurmError: it was refused.
    """
    given = clean_environment() if environ is None else environ
    try:
        done = run(argv, timeout_s=SUBMIT_S, environ=given, cwd=cwd)
    except SlurmSilentError as error:
        hint = f"{error.hint}; 'squeue --me' tells whether the job was taken"
        raise SlurmSilentError(error.message, hint=hint) from error
    found = parse_job_id(done.stdout)
    if done.code:
        refusal = failure(argv, done)
        if found is None:
            raise refusal
        hint = f"it printed the id {found[0]} all the same: 'squeue --me' tells whether it is taken"
        raise SlurmUnsureError(refusal.message, hint=f"{hint}; {refusal.hint}")
    if found is None:
        message = f"sbatch printed no job id, but {done.stdout.strip()[:200]!r}"
        raise SlurmUnsureError(message, hint="'squeue --me' tells whether the job was taken")
    said = (line.rstrip() for line in done.stderr.splitlines())
    return Accepted(*found, tuple(line for line in said if line))


def start_estimate(argv: Sequence[str]) -> str:
    """When and where a job of a command of :func:`sbatch_argv` would start: ``to start at ...``.

    By ``sbatch --test-only``, which checks resources, not the script, and submits nothing.

    Raises:
        SlurmError: no answer, or Slurm would refuse the job.
    """
    tested = [argv[0], "--test-only", *argv[1:]]
    done = run(tested, timeout_s=ASK_S, environ=clean_environment())
    if done.code:
        raise failure(tested, done)
    lines = (done.stderr or done.stdout).splitlines()
    found = [re.sub(r".*?(to start at)", r"\1", line) for line in lines if "to start at" in line]
    return found[-1] if found else ""


def scancel(ids: Sequence[str], *, cluster: str = "", timeout_s: float = 30.0) -> None:
    """Cancel jobs; one call for each thousand.

    Raises:
        SlurmError: no answer, or one of them could not be cancelled.
    """
    for some in _pieces(_checked(ids)):
        ask(["scancel", *_on(cluster), *some], timeout_s=timeout_s)


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a new job: what describes the job around this process is left out.

    A job submitted from inside a job would inherit its memory options, CPU masks and step; srun
    then refuses to start, or pins all ranks to a few CPUs. Outside a job nothing is left out.
    """
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_OF_A_JOB)
    }


def overriding_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables by which sbatch overrides the script's directives, sorted; see sbatch(1)."""
    return sorted(name for name in clean_environment(environ) if name.startswith("SBATCH_"))


def _checked(ids: Iterable[str]) -> list[str]:
    return [one for one in dict.fromkeys(ids) if job_id(one)]


def _pieces(ids: list[str]) -> Iterator[list[str]]:
    return (ids[at : at + _AT_ONCE] for at in range(0, len(ids), _AT_ONCE))


def _bases(ids: Iterable[str]) -> str:
    return ",".join(dict.fromkeys(one.partition("+")[0] for one in ids))


def _on(cluster: str) -> list[str]:
    return [f"--clusters={cluster}"] if cluster else []
