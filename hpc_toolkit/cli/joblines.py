"""A run's Slurm jobs as the commands show them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.slurm.records import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.slurm.records import JobRecord

_SHOWN = 8
_DAY_S = 86400


def job_json(jobs: Sequence[JobRecord]) -> list[dict[str, Any]]:
    """What ``status --json`` tells of each job."""
    keys = ("id", "state", "reason", "nodes", "restarts", "start", "end")
    return [{key: getattr(job, key) for key in keys} for job in jobs]


def job_lines(jobs: Sequence[JobRecord]) -> list[str]:
    """One line for each job, oldest first; of very many the newest, and those that have not ended
    before those that have.
    """
    ranked = sorted(
        range(len(jobs)), key=lambda at: (jobs[at].ended, jobs[at].state == UNKNOWN, -at)
    )
    shown = sorted(ranked[:_SHOWN])
    lines = [f"  job {jobs[at].id:<9} {_state(jobs[at])}" for at in shown]
    hidden = len(jobs) - len(shown)
    return lines + ([f"  jobs      and {hidden} more"] if hidden else [])


def _state(job: JobRecord) -> str:
    reason = f" ({job.reason})" if job.reason and not job.running else ""
    parts = [f"{job.state}{reason}"]
    if len(job.elements) > 1:
        parts.append("of its elements " + ", ".join(f"{n} {name}" for name, n in job.elements))
    if job.running and job.nodes:
        parts[0] += f" on {job.nodes}"
    if job.running and job.end is not None:
        parts.append(f"until {_clock(job.end)}")
    if job.waiting and job.start is not None and job.start > time.time():
        parts.append(f"starts about {_clock(job.start)}")
    if job.ended and job.end is not None:
        parts.append(f"ended {_clock(job.end)}")
    if job.ended and job.exit_code:
        parts.append(f"exit code {job.exit_code}")
    if job.restarts:
        parts.append(f"{job.restarts} restarts" if job.restarts > 1 else "1 restart")
    return ", ".join(parts)


def _clock(at: float) -> str:
    """The time of day here, with the date if it is not near."""
    near = abs(at - time.time()) < _DAY_S / 2
    return time.strftime("%H:%M" if near else "%Y-%m-%d %H:%M", time.localtime(at))
