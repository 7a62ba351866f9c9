"""Taking a run's jobs back from Slurm, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.slurm.client import scancel, squeue
from hpc_toolkit.submit.jobs import known_jobs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.layout import RunPaths
    from hpc_toolkit.slurm.records import JobRecord


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job of a run that is in the queue."""

    record: JobRecord
    """As Slurm sees it."""
    cluster: str
    """Its cluster, or ""."""


def cancelable_jobs(paths: RunPaths, *, only: Iterable[str] | None = None) -> list[QueuedJob]:
    """The run's jobs that are still in the queue; one question for each cluster.

    A job that bears another name than the one that was submitted is somebody else's: a cluster
    that was set up afresh gives the same ids again.

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
    found = []
    for cluster in dict.fromkeys(job.cluster for job in jobs):
        mine = {job.id: job for job in jobs if job.cluster == cluster}
        ids = [one for one in mine if not wanted or one in wanted]
        for one, record in squeue(ids, cluster=cluster).items():
            submitted = mine[one].submitted
            if submitted is not None and record.name not in ("", submitted.name):
                continue
            if record.waiting or record.running:
                found.append(QueuedJob(record, cluster))
    # An element of an array that is cancelled as a whole.
    whole = {job.record.id for job in found}
    return [job for job in found if job.record.array not in whole - {job.record.id}]


def cancel_jobs(jobs: list[QueuedJob]) -> None:
    """Cancel them; one call for each cluster.

    Raises:
        SlurmError: one of them could not be cancelled.
    """
    for cluster in dict.fromkeys(job.cluster for job in jobs):
        scancel([job.record.id for job in jobs if job.cluster == cluster], cluster=cluster)
