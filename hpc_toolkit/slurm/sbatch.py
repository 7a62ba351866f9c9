"""Submit jobs with sbatch, each of them once even if Slurm is busy and answers are lost."""

from __future__ import annotations

import os
import re
import shlex
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.client import (
    ASK_S,
    PATIENCE_S,
    SlurmError,
    SlurmSilentError,
    SlurmUnsureError,
    answer,
    ask,
    clean_environment,
    failure,
    on_cluster,
    pauses,
    run,
    scancel,
)
from hpc_toolkit.slurm.records import parse_job_id, script_options
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def sbatch_argv(
    script: Path, arguments: Sequence[str] = (), *, options: Sequence[str] = ()
) -> list[str]:
    return ["sbatch", "--parsable", *options, str(script), *arguments]


@dataclass(frozen=True, slots=True)
class Accepted:
    job: str
    cluster: str
    """The cluster that sbatch named, or ""."""
    said: tuple[str, ...] = ()
    """Non-empty lines that sbatch and the site's filters wrote to stderr."""


def sbatch(argv: Sequence[str], script: str) -> Accepted:
    """Submit one job with a command of :func:`sbatch_argv`, in :func:`clean_environment`.

    While Slurm is busy or out of reach, sbatch is tried again for up to two minutes. The job's
    comment, that of ``script`` and a unique word, shows whether an earlier try was accepted
    although its answer was lost: nothing is sent again before squeue has answered twice that it
    was not.

    Raises:
        SlurmUnsureError: sbatch did not answer, or printed no usable answer: the job may be queued.
        SlurmError: sbatch refused the job.
    """
    mark = f"hpctk:{os.urandom(6).hex()}"
    options = script_options(script)
    comment = " ".join(filter(None, (options.get("comment"), mark)))
    argv = [*argv[:2], f"--comment={comment}", *argv[2:]]
    # As sbatch reads them: a variable overrides the script.
    variables = (os.environ.get(f"{of}_CLUSTERS") for of in ("SBATCH", "SLURM"))
    cluster = next(filter(None, (*variables, options.get("clusters"))), "")
    accepted, failed = _until_accepted(argv, mark, cluster)
    if failed:
        # A slow controller may accept an earlier try after squeue has answered.
        with suppress(SlurmError):
            jobs = [job.job for job in _accepted(mark, cluster, ASK_S) if job.job != accepted.job]
            scancel(jobs, cluster=cluster)
    return accepted


def _until_accepted(argv: Sequence[str], mark: str, cluster: str) -> tuple[Accepted, bool]:
    """Submit the job with the comment ``mark``; also return whether a try has failed."""
    until = time.monotonic() + PATIENCE_S
    hint = f"'{shlex.join(_listing(cluster))} | grep {mark}' shows if the job was accepted"
    failed = False
    for pause_s in pauses():
        try:
            return _sent(argv), failed
        except SlurmUnsureError as error:
            again = isinstance(error, SlurmSilentError) and time.monotonic() < until
            hints = "; ".join(filter(None, (hint, error.hint)))
            if again and not failed:
                note(f"{error.message}; sbatch is tried again unless the job is in the queue")
            failed = True
            # Twice: a controller that hung may answer squeue before the sbatch that came earlier.
            for _ in range(2):
                time.sleep(pause_s if again else 0.0)
                try:
                    found = _accepted(mark, cluster, max(ASK_S, until - time.monotonic()))
                except SlurmError:
                    raise type(error)(error.message, hint=hints) from error
                if found:
                    note(f"job {found[0].job} was accepted although sbatch failed: {error.message}")
                    return found[0], failed
            if not again:
                raise type(error)(error.message, hint=f"it is not in the queue; {hints}") from error
    raise AssertionError  # there are always further pauses


def _sent(argv: Sequence[str]) -> Accepted:
    """Run sbatch once, and read its answer."""
    done = run(argv, timeout_s=PATIENCE_S, environ=clean_environment())
    found = parse_job_id(done.stdout)
    if done.code:
        refusal = failure(argv, done)
        if found is None:
            raise refusal
        hint = f"it printed the job id {found[0]}; {refusal.hint}"
        raise SlurmUnsureError(refusal.message, hint=hint)
    if found is None:
        raise SlurmUnsureError(f"sbatch printed no job id, but {done.stdout.strip()[:200]!r}")
    said = (line.rstrip() for line in done.stderr.splitlines())
    return Accepted(*found, tuple(line for line in said if line))


def _listing(cluster: str) -> list[str]:
    """The command that lists this user's jobs with their comments."""
    return ["squeue", *on_cluster(cluster), "--me", "--states=all", "--format=%F %k"]


def _accepted(mark: str, cluster: str, timeout_s: float) -> list[Accepted]:
    """This user's jobs whose comment contains ``mark``; SlurmError if squeue does not answer."""
    found, place = list[Accepted](), ""
    for line in ask(_listing(cluster), timeout_s=timeout_s).splitlines():
        place = line.removeprefix("CLUSTER: ") if line.startswith("CLUSTER: ") else place
        if mark in line:
            found.append(Accepted(line.split()[0], place))
    return list(dict.fromkeys(found))


def start_estimate(argv: Sequence[str]) -> str:
    """Return when and where Slurm would start a job: ``to start at ...``, or "".

    Runs a command of :func:`sbatch_argv` with ``--test-only``, which checks resources, not the
    script, and submits nothing.
    """
    tested = [argv[0], "--test-only", *argv[1:]]
    done = answer(tested, timeout_s=ASK_S, environ=clean_environment())
    if done.code:
        raise failure(tested, done)
    lines = (done.stderr or done.stdout).splitlines()
    found = [re.sub(r".*?(to start at)", r"\1", line) for line in lines if "to start at" in line]
    return found[-1] if found else ""
