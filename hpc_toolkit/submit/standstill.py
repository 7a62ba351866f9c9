"""Why a run makes no progress, as far as its jobs show."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.slurm.records import JobRecord


def lacks_workers(now: Status) -> bool:
    """Whether there is no progress because no worker is alive."""
    return now.reason.startswith("no worker is alive")


def why(now: Status, jobs: Sequence[JobRecord]) -> str:
    """Why there is no progress; without workers, what a job of the run waits for and what helps."""
    if not lacks_workers(now):
        return now.reason
    alive = [job for job in jobs if job.running]
    waiting = [job for job in jobs if job.waiting]
    if alive:
        job = alive[0]
        return (
            f"no worker is alive, and job {job.id} has nodes: its ranks are starting, or "
            f"'hpctk logs --job {job.id}' tells why not"
        )
    if not waiting:
        return now.reason
    from hpc_toolkit.slurm.pending import is_stuck, why_waiting

    # Prefer a job that may start without help.
    job = min(waiting, key=is_stuck)
    return f"no worker is alive, and job {job.id} waits: {why_waiting(job)}"
