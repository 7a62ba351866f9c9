"""Why nothing moves in a run, as far as its jobs tell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.slurm.records import JobRecord


def lacks_workers(now: Status) -> bool:
    """Whether nothing moves because no worker is alive."""
    return now.reason.startswith("no worker is alive")


def why(now: Status, jobs: Sequence[JobRecord]) -> str:
    """Why nothing moves, where the only hope is a job: what that waits for, and what helps."""
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

    # One that may start by itself is the better hope.
    job = min(waiting, key=is_stuck)
    return f"no worker is alive, and job {job.id} waits: {why_waiting(job)}"
