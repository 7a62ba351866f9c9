"""Read what the jobs of a run used: Slurm's accounting, and the monitor's samples."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.results.distributions import read_loads
from hpc_toolkit.results.efficiency import FIELDS, Efficiency, efficiency
from hpc_toolkit.submit.jobs import known_jobs

if TYPE_CHECKING:
    from hpc_toolkit.rundir.layout import RunPaths

_MOST_JOBS = 50


def used_by(paths: RunPaths, *, ask: bool = True) -> Efficiency | None:
    """Return what the ended jobs of a run used; None if nothing was measured.

    ``ask``: ask the accounting about the newest 50 jobs. Raises nothing because of Slurm.
    """
    by_cluster: dict[str, list[str]] = {}
    for job in known_jobs(paths)[-_MOST_JOBS:] if ask else ():
        by_cluster.setdefault(job.cluster, []).append(job.job)
    accounts = ""
    if by_cluster:
        # Runs without jobs do without Slurm's client, which takes long to import.
        from hpc_toolkit.slurm.client import sacct_text

        for cluster, ids in by_cluster.items():
            accounts += sacct_text(ids, FIELDS, cluster=cluster)
    with suppress(OSError):
        return efficiency(accounts, read_loads(paths))
    return None
