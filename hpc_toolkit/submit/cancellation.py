"""Cancel a run's Slurm jobs, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import PATIENCE_S, scancel, squeue
from hpc_toolkit.submit.jobs import known_jobs, own_login

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.slurm.records import JobRecord
    from hpc_toolkit.submit.jobs import RunJob


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
    # Workers name the elements of an array, perhaps many; it is enough to name the array.
    arrays = {job.job for job in jobs if job.array is not None}
    return queued_jobs(job for job in jobs if job.job.partition("_")[0] not in arrays - {job.job})


def queued_jobs(jobs: Iterable[RunJob]) -> list[QueuedJob]:
    """The jobs that are still in the queue; one query for each cluster.

    A job that differs from what is known of it, or that Slurm does not name, counts as foreign.

    Raises SlurmError: Slurm does not answer.
    """
    found = []
    wanted = list(jobs)
    for cluster in dict.fromkeys(job.cluster for job in wanted):
        mine = {job.job: job for job in wanted if job.cluster == cluster}
        for one, record in squeue(mine, cluster=cluster, timeout_s=PATIENCE_S).items():
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
        scancel([job.record.id for job in own if job.cluster == cluster], cluster=cluster)
