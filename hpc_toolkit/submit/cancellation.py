"""Taking a run's jobs back from Slurm, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import scancel, squeue
from hpc_toolkit.submit.jobs import known_jobs, own_login

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.layout import RunPaths
    from hpc_toolkit.slurm.records import JobRecord
    from hpc_toolkit.submit.jobs import KnownJob


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job in the queue with the id of one of a run."""

    record: JobRecord
    """As Slurm sees it."""
    cluster: str
    """Its cluster, or ""."""
    foreign: str = ""
    """Why it may be somebody else's, and is not cancelled; "" for the run's own."""


def cancelable_jobs(paths: RunPaths, *, only: Iterable[str] | None = None) -> list[QueuedJob]:
    """The run's jobs that are still in the queue, as :func:`queued_jobs` tells.

    Args:
        paths: of the run.
        only: ids of jobs, each of which must be the run's.

    Raises:
        ConfigError: an id is not the run's.
        SlurmError: Slurm does not answer; nothing was cancelled.
    """
    jobs = known_jobs(paths)
    wanted = list(only or ())
    for one in wanted:
        if one not in {job.id for job in jobs}:
            known = ", ".join(job.id for job in jobs[-10:]) or "none is known"
            message = f"--job {one}: no job of {paths.root}"
            raise ConfigError(message, hint=f"its jobs: {known}")
    return queued_jobs(job for job in jobs if not wanted or job.id in wanted)


def queued_jobs(jobs: Iterable[KnownJob]) -> list[QueuedJob]:
    """Those of the jobs that are still in the queue; one question for each cluster.

    A cluster that was set up afresh gives the same ids again, and so does another cluster that
    shares the file system: what differs from what is known of a job is somebody else's.

    Raises:
        SlurmError: Slurm does not answer.
    """
    found = []
    wanted = list(jobs)
    for cluster in dict.fromkeys(job.cluster for job in wanted):
        mine = {job.id: job for job in wanted if job.cluster == cluster}
        for one, record in squeue(mine, cluster=cluster).items():
            if record.waiting or record.running:
                found.append(QueuedJob(record, cluster, _foreign(mine[one], record)))
    # An element of an array that is cancelled as a whole.
    whole = {job.record.id for job in found if not job.foreign}
    return [job for job in found if job.record.array not in whole - {job.record.id}]


def _foreign(job: KnownJob, record: JobRecord) -> str:
    """Why this is not the job that was known; "" if nothing speaks against it."""
    user = (job.submitted.by if job.submitted else "") or own_login()
    if job.place and record.cluster not in ("", job.place):
        return f"this is a job of cluster {record.cluster}, not {job.place}"
    if record.user not in ("", user):
        return f"it is {record.user}'s"
    if job.name and record.name not in ("", job.name):
        return f"it is called {record.name}, not {job.name}"
    if job.submitted is None and not (job.name and record.name and record.user):
        missing = "its workers did not note its name" if not job.name else "Slurm did not say whose"
        return f"{missing}, and no submission was noted; 'scancel {job.id}' takes it"
    return ""


def cancel_jobs(jobs: Iterable[QueuedJob]) -> None:
    """Cancel those that are the run's own; one call for each cluster.

    Raises:
        SlurmError: one of them could not be cancelled.
    """
    own = [job for job in jobs if not job.foreign]
    for cluster in dict.fromkeys(job.cluster for job in own):
        scancel([job.record.id for job in own if job.cluster == cluster], cluster=cluster)
