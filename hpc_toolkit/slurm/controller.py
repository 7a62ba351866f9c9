"""Query nodes, jobs and limits, shrink running jobs, and submit jobs with sbatch.

Each job is submitted once, even if Slurm is busy and answers are lost.

Functions raise SlurmError if Slurm does not answer or refuses, unless they say otherwise.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_toolkit.slurm import client
from hpc_toolkit.slurm.records import (
    UNKNOWN,
    NodeRecord,
    job_id,
    parse_job_id,
    parse_nodes,
    script_options,
)
from hpc_toolkit.system.terminal import note

_SETTING = re.compile(r"([A-Za-z][\w\[\]]*)\s+= (.*)")


def node_states(names: Iterable[str], *, timeout_s: float = client.ASK_S) -> dict[str, NodeRecord]:
    """Return one record for every name; ``unknown`` for nodes that Slurm does not list.

    ``names`` are single names, not lists in brackets. A failing Slurm raises nothing.
    """
    wanted = [name for name in dict.fromkeys(names) if re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)]
    found: dict[str, NodeRecord] = {}
    if wanted:
        argv = ["scontrol", "--oneliner", "show", "node", ",".join(wanted)]
        # scontrol fails if one name does not exist, but still lists the others.
        with suppress(client.SlurmError):
            found = parse_nodes(client.answer(argv, timeout_s=timeout_s).stdout)
    return {name: found.get(name) or NodeRecord(name=name, state=UNKNOWN) for name in names}


def host_names(nodes: str, *, timeout_s: float = client.ASK_S) -> list[str]:
    """Expand a host list such as ``n[1-3,5]``; [] for text with other characters.

    Runs scontrol, which asks no controller for this.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.,\[\]-]*", nodes):
        return []
    return client.ask(["scontrol", "show", "hostnames", nodes], timeout_s=timeout_s).split()


def job_outputs(wanted: str) -> list[str]:
    """Return the logs of a job, or of the elements of an array, as ``scontrol show job`` says."""
    text = client.ask(["scontrol", "show", "job", wanted if job_id(wanted) else "0"])
    return re.findall(r"^\s*StdOut=(.+)$", text, re.MULTILINE)


def job_nodes(job: str) -> list[str]:
    """Return the nodes that a job has now, without lost ones; [] for a job without nodes.

    ``job`` is a raw id: for an array the id of one element, not of the array.
    """
    argv = ["squeue", "--noheader", f"--jobs={job}", "--format=%A %N"]
    # An array's last element has the id of the array as its raw id, so squeue lists all elements.
    rows = [line.split() for line in client.ask(argv).splitlines()]
    return host_names(next((row[1] for row in rows if row[0] == job and len(row) > 1), ""))


def set_nodes(job: str, nodes: Sequence[str]) -> None:
    """Shrink a running job to ``nodes`` (scontrol(1), NodeList)."""
    argv = ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}"]
    # scontrol writes scripts that reset a shell's variables into its working directory.
    with tempfile.TemporaryDirectory() as elsewhere:
        client.ask(argv, timeout_s=client.PATIENCE_S, cwd=Path(elsewhere))


def slurm_config(*, timeout_s: float = client.ASK_S) -> dict[str, str]:
    return parse_config(client.ask(["scontrol", "show", "config"], timeout_s=timeout_s))


def parse_config(text: str) -> dict[str, str]:
    """Parse ``scontrol show config``, without the settings that have no value."""
    found = map(_SETTING.fullmatch, text.splitlines())
    return {match[1]: value for match in found if match and (value := match[2].strip()) != "(null)"}


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
        with suppress(client.SlurmError):
            jobs = [
                job.job for job in _accepted(mark, cluster, client.ASK_S) if job.job != accepted.job
            ]
            client.scancel(jobs, cluster=cluster)
    return accepted


def _until_accepted(argv: Sequence[str], mark: str, cluster: str) -> tuple[Accepted, bool]:
    """Submit the job with the comment ``mark``; also return whether a try has failed."""
    until = time.monotonic() + client.PATIENCE_S
    hint = f"'{shlex.join(_listing(cluster))} | grep {mark}' shows if the job was accepted"
    failed = False
    for pause_s in client.pauses():
        try:
            return _sent(argv), failed
        except client.SlurmUnsureError as error:
            again = isinstance(error, client.SlurmSilentError) and time.monotonic() < until
            hints = "; ".join(filter(None, (hint, error.hint)))
            if again and not failed:
                note(f"{error.message}; sbatch is tried again unless the job is in the queue")
            failed = True
            # Twice: a controller that hung may answer squeue before the sbatch that came earlier.
            for _ in range(2):
                time.sleep(pause_s if again else 0.0)
                try:
                    found = _accepted(mark, cluster, max(client.ASK_S, until - time.monotonic()))
                except client.SlurmError:
                    raise type(error)(error.message, hint=hints) from error
                if found:
                    note(f"job {found[0].job} was accepted although sbatch failed: {error.message}")
                    return found[0], failed
            if not again:
                raise type(error)(error.message, hint=f"it is not in the queue; {hints}") from error
    raise AssertionError  # there are always further pauses


def _sent(argv: Sequence[str]) -> Accepted:
    """Run sbatch once, and read its answer."""
    done = client.run(argv, timeout_s=client.PATIENCE_S, environ=client.clean_environment())
    found = parse_job_id(done.stdout)
    if done.code:
        refusal = client.failure(argv, done)
        if found is None:
            raise refusal
        hint = f"it printed the job id {found[0]}; {refusal.hint}"
        raise client.SlurmUnsureError(refusal.message, hint=hint)
    if found is None:
        raise client.SlurmUnsureError(
            f"sbatch printed no job id, but {done.stdout.strip()[:200]!r}"
        )
    said = (line.rstrip() for line in done.stderr.splitlines())
    return Accepted(*found, tuple(line for line in said if line))


def _listing(cluster: str) -> list[str]:
    """The command that lists this user's jobs with their comments."""
    return ["squeue", *client.on_cluster(cluster), "--me", "--states=all", "--format=%F %k"]


def _accepted(mark: str, cluster: str, timeout_s: float) -> list[Accepted]:
    """This user's jobs whose comment contains ``mark``; SlurmError if squeue does not answer."""
    found, place = list[Accepted](), ""
    for line in client.ask(_listing(cluster), timeout_s=timeout_s).splitlines():
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
    done = client.answer(tested, timeout_s=client.ASK_S, environ=client.clean_environment())
    if done.code:
        raise client.failure(tested, done)
    lines = (done.stderr or done.stdout).splitlines()
    found = [re.sub(r".*?(to start at)", r"\1", line) for line in lines if "to start at" in line]
    return found[-1] if found else ""
