"""Submit and follow a run's workers from a notebook, on a cluster or locally.

``submit_workers`` submits workers of a run, ``preview`` shows what would be submitted, and
``watch`` follows a run. Workers for functions: :meth:`hpc_toolkit.Executor.slurm`.

>>> from hpc_toolkit import Run
>>> from hpc_toolkit.notebook import submit_workers
>>> items = [{"seed": seed} for seed in range(3)]
>>> run = Run.create("runs/bench", items, workload="bench:iterate")
>>> submit_workers(run, 2, cluster="local").wait(timeout=300)
True

Not promised: when workers start; on a cluster their jobs wait in the queue as any other.
"""

from __future__ import annotations

from hpc_toolkit.notebook.requests import LOCAL, Resources
from hpc_toolkit.notebook.workers import WorkerJobs, preview, report, submit_workers, watch

__all__ = ["LOCAL", "Resources", "WorkerJobs", "preview", "report", "submit_workers", "watch"]
