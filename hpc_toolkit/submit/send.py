"""Check a submission, exclude nodes that failed, send it to Slurm, record its jobs; cancel jobs.

The run, or the directory of a training, keeps a copy of the script, and sbatch gets that copy. A
crash between sbatch and the job's record loses only the record: the job's workers name their job
themselves.

A node that returns after a failure often fails again, and Slurm allocates it at once. The same is
true of a sick node, on which items fail that other nodes finish.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.left import pause_reason
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.controller import sbatch
from hpc_toolkit.slurm.records import NODE_FAILURES, JobRecord, script_options
from hpc_toolkit.slurm.render.directives import forbidden
from hpc_toolkit.slurm.render.file import log_directory, write_script
from hpc_toolkit.submit import (
    JobStates,
    RunJob,
    keep_script,
    known_jobs,
    own_login,
    record_job,
    without_elements,
)
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.run import Run
    from hpc_toolkit.submit.submission import Submission

_EXCLUDE = "--exclude="
MOST = 4
"""Most nodes that are excluded; if more failed, the cause is elsewhere."""
_RECENT_S = 86400.0
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")

Failure = tuple[float, str]
"""(Epoch seconds at which a node failed, description of the failure)."""


def check_run(run: Run, *, force: bool = False) -> None:
    """Refuse a run on which a job would do nothing, unless ``force`` is set.

    Raises RunError: it is complete, paused, or not to be trusted.
    """
    refuse_untrusted(run.root)
    status = run.status(forecast=False)
    if force:
        return
    if status.complete:
        message = f"{run.root} is complete: no items are left"
        hint = "'hpctk retry' makes failed items pending; 'hpctk submit --force' submits anyway"
        raise RunError(message, hint=hint)
    reasons = [reason for reason in map(pause_reason, run.view.stages.values()) if reason]
    if reasons:
        message = f"{run.root} is paused: {reasons[0]}; a job would exit immediately"
        raise RunError(
            message,
            hint="fix the cause and run 'hpctk retry'; 'hpctk submit --force' submits anyway",
        )


def check_directory(cluster: Cluster, directory: Path) -> None:
    """Refuse to submit from a directory from which the site takes no jobs.

    Raises ConfigError: names the fact and where it is written.
    """
    reason = forbidden(cluster, directory)
    if reason is not None:
        raise ConfigError(reason, hint="submit from another directory")


def note_overrides() -> None:
    """Name the variables of the environment that override the options of a script."""
    for name in sorted(slurm.clean_environment()):
        if name.startswith("SBATCH_") and name != "SBATCH_JOB_NAME":  # the command names the job
            note(f"{name} in the environment overrides the script; see sbatch(1)", "warning")


def without_failed_nodes(submission: Submission) -> Submission:
    """Exclude the nodes that failed for the run, just read, within a day; the notes say why.

    A script that names its nodes stays as it is.
    """
    run, options = submission.run, script_options(submission.text)
    if run is None or "nodelist" in options or "nodefile" in options:
        return submission
    found = failed_nodes(run.view, JobStates(run.paths).read())
    names = list(found)[:MOST]
    if not names:
        return submission
    notes = [f"{name} is left out (--no-exclude-failed takes it): {found[name]}" for name in names]
    # The new option overrides that of the script.
    option = f"{_EXCLUDE}{','.join([*filter(None, [options.get('exclude')]), *names])}"
    return replace(
        submission,
        options=(*submission.options, option),
        excluded=tuple(names),
        notes=(*submission.notes, *notes),
    )


def send(submission: Submission) -> Iterator[RunJob]:
    """Submit, and yield each job when Slurm has accepted it; a yielded job is in the queue.

    If Slurm accepts a job only without the exclusion of failed nodes, they are not excluded. That,
    and sbatch's output beside the ids, goes to stderr.

    Raises HpcToolkitError: sbatch refused, the script or the log directory cannot be written, or an
    edited script is in the way; nothing more is submitted then.
    """
    _make_log_directory(submission)
    for _ in range(submission.copies):
        try:
            job = _send_one(submission)
        except slurm.SlurmUnsureError:
            raise
        except slurm.SlurmError as error:
            if not submission.excluded:
                raise
            # Only Slurm knows whether the other nodes are enough.
            names = ", ".join(submission.excluded)
            options = [one for one in submission.options if not one.startswith(_EXCLUDE)]
            submission = replace(submission, options=tuple(options), excluded=())
            job = _send_one(submission)
            note(f"{names} may be allocated after all; without: {error.message}")
        yield job


def _make_log_directory(submission: Submission) -> None:
    logs = submission.cwd / log_directory(submission.log)
    if len(logs.parts) < len((submission.cwd / submission.log).parent.parts):
        said = f"{submission.log}: Slurm before 23.02 does not create this directory"
        note(f"{said}, and a job without its log fails immediately", "warning")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"--output: cannot make {logs}: {error.strerror}"
        hint = "a job that cannot write its log fails immediately; choose another path"
        raise ConfigError(message, hint=hint) from error


def _send_one(submission: Submission) -> RunJob:
    _write(submission)
    argv = submission.argv()
    accepted = sbatch(argv, submission.text)
    job = RunJob(
        job=accepted.job,
        cluster=accepted.cluster,
        name=submission.name,
        array=submission.array,
        script=f"jobs/{submission.place.name}",
        argv=tuple(argv),
        cwd=str(submission.cwd),
        log=submission.log,
        excluded=submission.excluded,
        submitted=round(time.time(), 3),
        by=own_login(),
    )
    if submission.records is not None:
        record_job(submission.records, job)
    sys.stderr.writelines(f"{printable(line)}\n" for line in accepted.said)
    return job


def _write(submission: Submission) -> None:
    records, path = submission.records, submission.path
    if records is None:
        if not path.exists() or path.read_text(encoding="utf-8") != submission.text:
            write_script(path, submission.text)
        return
    try:
        keep_script(records, submission.name, submission.text)
    except OSError as error:
        message = f"cannot keep the script in {records.jobs}: {error.strerror}"
        raise RunError(message, hint="check its permissions and the free space") from error


def failed_nodes(view: RunView, records: list[JobRecord]) -> dict[str, str]:
    """The nodes to exclude, latest failure first, each with the reason; ``view`` is up to date."""
    found: dict[str, Failure] = {}
    sources = (_of_deaths(view), _of_jobs(records), _of_sick(view))
    for name, failure in (one for source in sources for one in source):
        found[name] = max(failure, found.get(name, failure))
    recent = sorted(found.items(), key=lambda entry: -entry[1][0])
    now = time.time()
    return {
        name: why for name, (at, why) in recent if now - at < _RECENT_S and _NODE.fullmatch(name)
    }


def _of_deaths(view: RunView) -> Iterator[tuple[str, Failure]]:
    units = [unit for stage in view.stages.values() for unit in stage.state.units.values()]
    for death in (death for unit in units for death in unit.deaths.values()):
        if death.explained == "node failure":
            presence = read_presence(view.paths.worker(death.worker))
            at = presence.at if presence is not None else 0.0
            job = f" of job {presence.job}" if presence is not None and presence.job else ""
            yield death.host, (at, f"it failed under worker {death.worker}{job}")


def _of_sick(view: RunView) -> Iterator[tuple[str, Failure]]:
    """Hosts that workers of a Slurm job left because items failed there and not elsewhere."""
    control = ControlReader(view.paths)
    control.poll()
    for notice in control.health:
        presence = read_presence(view.paths.worker(notice.worker))
        if notice.sure and notice.whole and presence is not None and presence.job:
            why = notice.reason.partition(": ")[2]
            yield notice.host, (notice.at, f"{why} (job {presence.job})")


def _of_jobs(records: list[JobRecord]) -> Iterator[tuple[str, Failure]]:
    """Nodes of jobs on one node that ended because it failed; Slurm names no others."""
    for record in (start for job in records for start in (job, *job.lost)):
        if record.state in NODE_FAILURES:
            yield record.nodes, (record.end or 0.0, f"job {record.id} ended with {record.state}")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue that has the id of one of the run's jobs."""

    record: JobRecord
    cluster: str
    foreign: str = ""
    """Why it may not be the run's, and is not cancelled; "" for the run's own."""


def cancelable_jobs(paths: RunPaths, *, only: Iterable[str] | None = None) -> list[QueuedJob]:
    """The run's jobs that are still in the queue, as :func:`queued_jobs` returns them.

    ``only`` are ids of jobs, each of which must be the run's.

    Raises:
        ConfigError: an id is not the run's.
        SlurmError: Slurm does not answer; nothing was cancelled.
    """
    jobs = known_jobs(paths)
    wanted = list(only or ())
    ids = [job.job for job in jobs]
    if unknown := [one for one in wanted if one not in ids]:
        message = f"--job {unknown[0]}: no job of {paths.root}"
        raise ConfigError(message, hint=f"its jobs: {', '.join(ids[-10:]) or 'none is known'}")
    if wanted:
        return queued_jobs([job for job in jobs if job.job in wanted])
    return queued_jobs(without_elements(jobs))


def queued_jobs(jobs: Iterable[RunJob]) -> list[QueuedJob]:
    """The jobs that are still in the queue; one query for each cluster.

    A job that differs from what is known of it, or that Slurm does not name, counts as foreign.

    Raises SlurmError: Slurm does not answer.
    """
    found = []
    wanted = list(jobs)
    for cluster in dict.fromkeys(job.cluster for job in wanted):
        mine = {job.job: job for job in wanted if job.cluster == cluster}
        for one, record in slurm.squeue(mine, cluster=cluster, timeout_s=slurm.PATIENCE_S).items():
            if record.waiting or record.running:
                found.append(QueuedJob(record, cluster, _foreign(mine[one], record)))
    # Leave out the elements of an array that is cancelled as a whole.
    whole = {job.record.id for job in found if not job.foreign}
    return [job for job in found if job.record.array not in whole - {job.record.id}]


def _foreign(job: RunJob, record: JobRecord) -> str:
    """Why this may not be the job that is known; "" for the run's own."""
    if other := job.contradicts(record, user=own_login()):
        return other
    missing = ""
    if not record.name or not record.user:
        missing = "Slurm did not say whose it is"
    elif not job.recorded and not job.name:
        missing = "its workers did not note its name, and no submission was noted"
    return f"{missing}; {job.by_hand}" if missing else ""


def cancel_jobs(jobs: Iterable[QueuedJob]) -> None:
    """Cancel the jobs that are the run's own; one call for each cluster.

    Raises SlurmError: one of them could not be cancelled.
    """
    own = [job for job in jobs if not job.foreign]
    for cluster in dict.fromkeys(job.cluster for job in own):
        slurm.scancel([job.record.id for job in own if job.cluster == cluster], cluster=cluster)
