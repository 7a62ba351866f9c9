"""The jobs that an executor submits for its calls: sent once, found again, and ended with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.notebook.workers import (
    LocalRequest,
    WorkerJobs,
    local_state,
    requested_workers,
    send_request,
)
from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.report.panel import one_line
from hpc_toolkit.run import Run
from hpc_toolkit.submit.jobs import read_jobs
from hpc_toolkit.submit.send import cancel_jobs, queued_jobs
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.notebook.resources import Resources
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.submit.jobs import RunJob
    from hpc_toolkit.submit.submission import Submission

_LOOK_S = 60.0
"""Seconds without a result after which Slurm is asked whether the jobs have ended."""


@dataclass(slots=True)
class _Wanted:
    request: Submission | LocalRequest
    jobs: WorkerJobs
    count: int = 1
    """How many of its jobs, or arrays, there must be."""
    is_sent: bool = field(default=False)

    def is_of(self, job: RunJob) -> bool:
        """Whether a job was submitted by this request, perhaps by an earlier process."""
        if isinstance(self.request, LocalRequest):
            return job.local and job.workers == self.request.n
        # The name of the run's copy of a script has a checksum of its text.
        names = {self.request.place(one).name for one in self.request.scripts}
        return not job.local and job.script.rpartition("/")[2] in names


class CallJobs:
    """Jobs of workers for calls, which one thread requests, and another follows and ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen = Run(run.root, run.manifest)  # a view serves one thread
        self._wanted: list[_Wanted] = []
        self._look_at, self._noted = time.monotonic() + _LOOK_S, False

    def want(
        self,
        n: int | None,
        cluster: str | Cluster | None,
        resources: Resources,
        *,
        array: bool,
        again: bool,
    ) -> WorkerJobs:
        """Check a request, which :meth:`send` sends; ``again``: beside equal ones before it."""
        request = requested_workers(self._run, n, cluster, array, resources)
        found = next((one for one in self._wanted if one.request == request), None)
        if found is None:
            found = _Wanted(request, WorkerJobs(self._run, []))
            self._wanted.append(found)
        else:
            found.count += again
        found.is_sent = False
        return found.jobs

    def send(self) -> None:
        """Submit what was requested, but for jobs that wait or run already.

        Raises RunError, SlurmError: it is not known what was submitted before, or Slurm refused.
        """
        for wanted in (one for one in self._wanted if not one.is_sent):
            known = [job for job in read_jobs(self._run.paths) if wanted.is_of(job)]
            queued = {
                one.record.array or one.record.id
                for one in queued_jobs(job for job in known if not job.local)
                if not one.foreign
            }
            live = [job for job in known if job.job in queued or local_state(job) == "RUNNING"]
            each = 1 if isinstance(wanted.request, LocalRequest) else len(wanted.request.scripts)
            if live:
                ids = ", ".join(job.job for job in live)
                note(f"{self._run.root} has job {ids} of this request: it is not sent again")
            wanted.jobs.jobs[:] = live
            for _ in range(wanted.count - len(live) // each):
                wanted.jobs.jobs += send_request(self._run, wanted.request)
            wanted.is_sent = True
        self._look_at, self._noted = time.monotonic() + _LOOK_S, False

    @property
    def _jobs(self) -> WorkerJobs:
        return WorkerJobs(self._seen, [job for one in self._wanted for job in one.jobs.jobs])

    def line(self) -> str:
        """The workers and the time left, or what the jobs wait for."""
        now = self._jobs.status()
        return now.reason if not now.workers.alive else one_line(now).partition("; ")[2]

    def look(self, shown: Path, since: float) -> None:
        """Say how the jobs ended if no worker is left, and there is no result ``since`` a time."""
        if self._noted or time.monotonic() < max(self._look_at, since + _LOOK_S):
            return
        self._look_at = time.monotonic() + _LOOK_S
        jobs = self._jobs
        if jobs.jobs and jobs.are_over() and not jobs.living():
            self._noted = True
            states = ", ".join(f"{job} {state}" for job, state in jobs.states().items())
            hint = "the same call of slurm() sends another, also when the script is started again"
            note(f"{shown}: calls are left, and its jobs have ended ({states}); {hint}")

    def end(self) -> None:
        """Cancel jobs that have not started, and jobs whose workers have not."""
        jobs = self._jobs.jobs
        WorkerJobs(self._seen, [job for job in jobs if job.local]).cancel()
        started = {
            one.job
            for one in self._seen.view.presences().values()
            if one is not None and one.state != FINISHED
        }
        # Elements of an array are cancelled together: their workers have been asked to exit.
        queued = queued_jobs(job for job in jobs if not job.local)
        cancel_jobs(one for one in queued if one.record.waiting or one.record.id not in started)
