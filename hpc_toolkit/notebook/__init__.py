"""Submit and follow a run's workers from a notebook, through submitit: on a cluster or locally.

``executor`` makes a submitit executor from a cluster's facts, ``submit_workers`` submits workers of
a run instead of thousands of functions, ``preview`` shows what would be submitted, and ``watch``
follows a run. submitit is imported when the first executor is made.
"""

from __future__ import annotations

from hpc_toolkit.notebook.executors import LOCAL, Resources, executor
from hpc_toolkit.notebook.jobs import WorkerJobs, report, watch
from hpc_toolkit.notebook.workers import preview, submit_workers

__all__ = [
    "LOCAL",
    "Resources",
    "WorkerJobs",
    "executor",
    "preview",
    "report",
    "submit_workers",
    "watch",
]
