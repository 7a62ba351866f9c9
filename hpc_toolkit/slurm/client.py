"""Client of Slurm's programs, the only one outside ``lab/``: argument lists in, records out.

A missing or late answer means "unknown", never that a job failed. Functions that run a program
raise SlurmError if it is missing, fails or does not answer in time.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.slurm import records
from hpc_toolkit.system.processes import kill_group
from hpc_toolkit.system.ranks import without_rank
from hpc_toolkit.system.terminal import note

ASK_S = 5.0
"""Seconds that a query of Slurm may take."""
PATIENCE_S = 120.0
"""Seconds for which a command that must reach Slurm is tried again; sbatch may take as long."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 10.0
_DAY_S = 86400.0
_LEAST_S = 0.05
_AT_ONCE = 1000
"""Job ids in one command: the kernel limits one argument to 128 KiB (execve(2))."""

_KEPT = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT"}
_OF_A_JOB = (
    *("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SUBMITIT_", "PMI"),
    *("HPCTK_DEADLINE", "HPCTK_ARRAY_INDEX", "HPCTK_HOST"),
)
# Prefixes of variables that change the columns, the order or the rows of Slurm's output.
_OF_A_QUESTION = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_", "SCANCEL_", "SLURM_BITSTR_LEN")
_HIDDEN = (
    "the site hides this from users (PrivateData in slurm.conf): ask the site for its limits, and"
    " write the cluster file by hand"
)
# Causes and remedies that Slurm's own error messages leave out.
_REFUSALS = {
    "Job dependency problem": "Slurm 23.02 and newer refuse to wait for a job that ended more than"
    " MinJobAge seconds ago or does not exist: correct --dependency, or leave it out",
    "Invalid account or account/partition": "'sacctmgr show assoc user=$USER' lists your accounts:"
    " choose one with --account; if it lists none, ask the site for one",
    "Invalid job array specification": "an index must be less than MaxArraySize, which 'scontrol"
    " show config' prints: correct max_array_size in the cluster file, or use --cluster generic",
    "Memory required by task is not available": "request less with --mem: MaxMemPerNode in"
    " 'scontrol show partition' and 'scontrol show config' limits it",
    "Requested time limit is invalid": "'sinfo -o \"%P %l\"' prints the limit of each partition:"
    " request less with --time",
    "temporarily unable to accept job": "the queue may be full (MaxJobCount): wait until jobs have"
    " ended, or submit fewer",
    "load_partitions error: Access/permission denied": _HIDDEN,
    "load_node error: Access/permission denied": _HIDDEN,
}


# Errors of a busy or restarting Slurm (slurm_errno.c, sbatch.c); the same command works later.
_PASSING = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Unexpected message received"
    r"|Zero Bytes were transmitted|Message (send|receive) failure|Communication connection failure"
    r"|[Tt]emporarily (unable|unavailable|disabled)|try again|standby mode|sleeping and retrying"
    r"|Connection (refused|reset|timed out)|Problem talking to the database|persistent connection"
)


class SlurmError(HpcToolkitError):
    """A Slurm program is missing, did not answer in time, or refused."""


class SlurmFullError(SlurmError):
    """A limit of the number of jobs in the queue is reached."""


class SlurmUnsureError(SlurmError):
    """A Slurm program may have done its work: running it again could do the work twice."""


class SlurmSilentError(SlurmUnsureError):
    """A Slurm program, or the daemon that it asks, did not answer in time."""

    exit_code = TRY_AGAIN


@dataclass(frozen=True, slots=True)
class Finished:
    """The exit code and the output of a program."""

    code: int
    """Exit code; negative for a signal."""
    stdout: str
    stderr: str
    raw: bytes = b""
    """stdout before decoding: the widths of Slurm's columns are in bytes."""


def run(
    argv: Sequence[str],
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Finished:
    """Run one Slurm program to its end.

    By default it runs in the C locale and prints times in epoch seconds. A given ``environ`` is
    passed on unchanged, because sbatch hands all of it to the job.

    Raises:
        SlurmSilentError: the program did not finish within ``timeout_s`` seconds; its process
            group was killed.
        SlurmError: the program cannot be started.
    """
    if environ is None:
        kept = _without(_OF_A_QUESTION, os.environ)
        environ = {**kept, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    # Files, not pipes: sites wrap these programs, and a process that a wrapper leaves behind would
    # keep a pipe open after the program has ended.
    # In memory, so that queries work on a full disk.
    files = [os.fdopen(os.memfd_create(name), "w+b") for name in ("stdout", "stderr")]
    with files[0] as out, files[1] as err:
        try:
            # In a process group of its own, so that a kill reaches all its children.
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
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
                # sbatch retries for two minutes and prints why.
                said = _lines(_content(err).decode(errors="replace"))
                hints = [*_causes(said), "check the controller with 'scontrol ping'"]
                printed = f"; it printed: {said}" if said else ""
                raise SlurmSilentError(message + printed, hint="; ".join(hints)) from None
        raw, errors = map(_content, files)
        return Finished(code, raw.decode(errors="replace"), errors.decode(errors="replace"), raw)


def _content(file: BinaryIO) -> bytes:
    # pread: a process that a wrapper left behind may still write at the file offset, which both
    # share.
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


def _lines(text: str) -> str:
    """Return the first lines of an error in one line."""
    return "; ".join([line.strip() for line in text.splitlines() if line.strip()][:5])


def _causes(words: str) -> list[str]:
    return [hint for what, hint in _REFUSALS.items() if what in words]


def _without(prefixes: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def ask(argv: Sequence[str], *, timeout_s: float = ASK_S, **how: Any) -> str:
    done = answer(argv, timeout_s=timeout_s, **how)
    if done.code:
        raise failure(argv, done)
    return done.stdout


def text(argv: Sequence[str], *, timeout_s: float = PATIENCE_S) -> str:
    """Return what :func:`ask` does, or "" if Slurm refuses or does not answer."""
    try:
        return ask(argv, timeout_s=timeout_s)
    except SlurmError:
        return ""


def answer(argv: Sequence[str], *, timeout_s: float, **how: Any) -> Finished:
    """Run a program that may run more than once, until Slurm is neither busy nor out of reach.

    It is tried again with growing pauses for up to ``timeout_s`` seconds. ``how`` is passed to
    :func:`run`, whose errors this raises.
    """
    until = time.monotonic() + timeout_s
    done = None
    for pause_s in pauses():
        try:
            done = run(argv, timeout_s=max(_LEAST_S, until - time.monotonic()), **how)
        except SlurmSilentError:
            if done is None:
                raise
            return done
        left_s = until - time.monotonic()
        if not (done.code and passes(done.stderr)) or left_s <= pause_s:
            break
        if timeout_s > ASK_S and pause_s == _FIRST_PAUSE_S:
            note(f"{argv[0]}: {_lines(done.stderr)}; trying again for {left_s:.0f} s")
        time.sleep(pause_s)
    assert done is not None
    return done


def pauses() -> Iterator[float]:
    """Seconds to wait before each further try, without end."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def passes(said: str) -> bool:
    """Whether an error message is about a Slurm that is busy or cannot be reached now."""
    return _PASSING.search(said) is not None


# What Slurm's programs print where they find no slurm.conf.
_NO_CONFIGURATION = "Could not establish a configuration source"
NOT_SET_UP = "not set up on this machine (no slurm.conf)"


def failure(argv: Sequence[str], done: Finished) -> SlurmError:
    import shlex

    words = _lines(done.stderr) or f"exit code {done.code}"
    if _NO_CONFIGURATION in words:
        hint = "run it on a login node, or try it on a Slurm of your own: 'hpctk lab up'"
        return SlurmError(f"{argv[0]}: {NOT_SET_UP}", hint=hint)
    hint = "; ".join([*_causes(words), f"the command was: {shlex.join(argv)}"])
    kind = SlurmSilentError if passes(words) else SlurmError
    return kind(f"{argv[0]}: {words}", hint=hint)


def squeue(
    ids: Iterable[str], *, cluster: str = "", timeout_s: float = ASK_S
) -> dict[str, records.JobRecord]:
    """Return the jobs that the queue still knows, by requested id; one call per 1000 ids.

    Slurm forgets a job some minutes after its end (MinJobAge); its id then has no entry.
    """
    columns = ",".join(f"{name}:{width}" for name, width in records.SQUEUE_FIELDS)
    argv = ["squeue", *on_cluster(cluster), "--noheader", "--array", "--states=all"]
    argv.append(f"--Format={columns}")
    found: dict[str, records.JobRecord] = {}
    # squeue fails if its only id is unknown; of several ids it lists those that it knows.
    for some, done in _answers(argv, ids, "Invalid job id", timeout_s):
        found |= records.by_id(records.parse_squeue(done.raw), some)
    return found


def sacct(
    ids: Iterable[str], *, cluster: str = "", since: float | None = None, timeout_s: float = ASK_S
) -> dict[str, records.JobRecord]:
    """Return the jobs that the accounting knows, by requested id; one call per 1000 ids.

    The accounting may lag behind the queue by seconds. Without accounting the result is empty.

    ``since`` is the time of the earliest submission in epoch seconds; None: 30 days ago. Jobs that
    ended a day or more before it are older jobs with reused ids.
    """
    argv = _sacct(cluster, since, ("--allocations", f"--format={','.join(records.SACCT_FIELDS)}"))
    found: dict[str, records.JobRecord] = {}
    for some, done in _answers(argv, ids, "accounting storage is disabled", timeout_s):
        found |= records.by_id(records.parse_sacct(done.stdout), some)
    return found


def sacct_text(ids: Iterable[str], fields: Iterable[str], *, cluster: str = "") -> str:
    """Return these columns of jobs and their steps, a line each; "" without an answer."""
    argv = _sacct(cluster, None, (f"--format={','.join(fields)}",))
    try:
        return "".join(one.stdout for _, one in _answers(argv, ids, "disabled", ASK_S))
    except SlurmError:
        return ""


def _sacct(cluster: str, since: float | None, options: Iterable[str]) -> list[str]:
    argv = ["sacct", *on_cluster(cluster), "--noheader", "--parsable2", "--duplicates", *options]
    # By default some versions search today only; a search from 1970 on takes minutes at large
    # sites.
    start = "now-30days"
    if since is not None:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(max(0.0, since - _DAY_S)))
    return [*argv, f"--starttime={start}"]


def _answers(
    argv: list[str], ids: Iterable[str], harmless: str, timeout_s: float
) -> Iterator[tuple[list[str], Finished]]:
    """Ids, and the answer to a query of them; an error that says ``harmless`` is an answer too."""
    until = time.monotonic() + timeout_s
    for some in _pieces(ids):
        bases = dict.fromkeys(one.partition("+")[0] for one in some)
        asked = [*argv, f"--jobs={','.join(bases)}"]
        done = answer(asked, timeout_s=max(_LEAST_S, until - time.monotonic()))
        if done.code and harmless not in done.stderr:
            raise failure(asked, done)
        yield some, done


def job_states(
    ids: Iterable[str], *, cluster: str = "", since: float | None = None, timeout_s: float = ASK_S
) -> dict[str, records.JobRecord]:
    """Return one record for every id: from the queue, else the accounting, else ``unknown``.

    ``since`` is that of :func:`sacct`. A missing, failing or silent Slurm raises nothing: the
    ``reason`` of an unknown job says what happened. Takes at most ``timeout_s`` seconds.
    """
    until = time.monotonic() + timeout_s
    wanted = list(dict.fromkeys(ids))
    found: dict[str, records.JobRecord] = {}
    why = "no time was left to ask Slurm"
    answered = False
    if timeout_s >= _LEAST_S:
        try:
            found = squeue(wanted, cluster=cluster, timeout_s=timeout_s)
            answered = True
            why = "the queue does not know it, and there was no time left to ask accounting"
        except SlurmError as error:
            why = error.message
    missing = [one for one in wanted if one not in found]
    left_s = until - time.monotonic()
    if missing and left_s >= _LEAST_S:
        said = "neither squeue nor sacct lists it"
        try:
            found |= sacct(missing, cluster=cluster, since=since, timeout_s=left_s)
        except SlurmError as error:
            said = f"the queue does not know it, and {error.message}"
        why = said if answered else why
    return {
        one: found.get(one) or records.JobRecord(id=one, state=records.UNKNOWN, reason=why)
        for one in wanted
    }


def scancel(ids: Sequence[str], *, cluster: str = "") -> None:
    """Cancel jobs; one call per 1000 ids. Cancelling a job twice does no harm."""
    for some in _pieces(ids):
        try:
            ask(["scancel", *on_cluster(cluster), *some], timeout_s=PATIENCE_S)
        except SlurmUnsureError as error:
            known = " ".join(["squeue", *on_cluster(cluster), f"--jobs={','.join(some[:10])}"])
            hint = f"'{known}' shows which jobs are not cancelled; {error.hint}"
            raise type(error)(error.message, hint=hint) from error


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a new job, without the variables of an enclosing job or rank.

    A job submitted from inside a job would inherit its memory options, CPU masks and step; srun
    then refuses to start, or pins all ranks to a few CPUs. Outside a job only those of a rank are
    removed.
    """
    inherited = without_rank(environ)
    if "SLURM_JOB_ID" not in environ:
        return inherited
    kept = {name: environ[name] for name in _KEPT & environ.keys()}
    return {**_without(_OF_A_JOB, inherited), **kept}


def _pieces(ids: Iterable[str]) -> Iterator[list[str]]:
    valid = [one for one in dict.fromkeys(ids) if records.job_id(one)]
    return (valid[at : at + _AT_ONCE] for at in range(0, len(valid), _AT_ONCE))


def on_cluster(cluster: str) -> list[str]:
    """The option of Slurm's programs that names a cluster; none for the local one."""
    return [f"--clusters={cluster}"] if cluster else []
