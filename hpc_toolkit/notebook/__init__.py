"""Submit and follow a run's workers from a notebook, through submitit: on a cluster or locally.

``executor`` makes a submitit executor from a cluster's facts, ``submit_workers`` submits workers of
a run instead of thousands of functions, ``preview`` shows what would be submitted, and ``watch``
follows a run. submitit is imported when the first executor is made.

>>> from hpc_toolkit import Run
>>> from hpc_toolkit.notebook import submit_workers
>>> items = [{"seed": seed} for seed in range(3)]
>>> run = Run.create("runs/bench", items, workload="bench:iterate")
>>> submit_workers(run, 2, cluster="local").wait(timeout=300)
True

Not promised: when workers start; on a cluster their jobs wait in the queue as any other.
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
