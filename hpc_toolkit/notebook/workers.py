"""The jobs of workers: submit and follow them, and those that an executor submits for its calls."""

from __future__ import annotations

import html
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from hpc_toolkit.errors import RunError
from hpc_toolkit.notebook.requests import (
    PROCESSES,
    RUNNING,
    LocalRequest,
    Resources,
    local_state,
    requested_workers,
    send_request,
)
from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.report.live import StatusDisplay, status_html
from hpc_toolkit.report.panel import one_line
from hpc_toolkit.results.progress import NO_WORKER
from hpc_toolkit.results.status import Beside, Halt, Status
from hpc_toolkit.results.workers import living_workers
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.records import UNKNOWN, JobRecord
from hpc_toolkit.submit.jobs import JobStates, RunJob, log_files, read_jobs
from hpc_toolkit.submit.send import cancel_jobs, queued_jobs
from hpc_toolkit.submit.standstill import why
from hpc_toolkit.submit.submission import Submission
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.terminal import note, printable

_LOOK_FIRST_S, _LOOK_LAST_S, _ASK_FIRST_S, _ASK_LAST_S = 0.2, 2.0, 2.0, 60.0
_SILENT_S = 60.0
"""Seconds without a result of a call after which Slurm is asked whether the jobs have ended."""
_NO_SCRIPT = "# processes on this machine; nothing is given to sbatch\n"


def submit_workers(
    run: Run | str | Path,
    n: int | None = None,
    *,
    cluster: str | Cluster | None = None,
    array: bool = False,
    **resources: Unpack[Resources],
) -> WorkerJobs:
    """Submit ``n`` workers of a run: one job of ``n`` ranks, or an array of small jobs.

    A job starts again while items are left. Local workers leave when the thread that submitted
    them ends, and write to a log below ``jobs`` of the run.

    Args:
        run: the run, or its directory, which the nodes must see.
        n: number of workers; None: as many as ``nodes`` have, one per GPU or else one per node.
        cluster: a name of ``hpctk cluster list``, the path of a TOML file, the facts themselves, or
            "local": processes on this machine, with the environment and GPUs of this process, for
            which most resources except ``time`` and ``gpus_per_node`` have no effect. None:
            ``$HPCTK_CLUSTER``, else the cluster that is recognized here.
        array: submit jobs of one node each, which start and end independently of each other.
        resources: see :class:`Resources`; ``nodes`` follows from ``n`` if it is left out.

    Raises:
        ConfigError, RenderError: ``n`` workers cannot be submitted in this shape.
        RunError: the run is complete or paused, or others could change what it executes.
        SlurmError: Slurm refused the job.
    """
    run = run if isinstance(run, Run) else Run.open(run)
    return WorkerJobs(run, send_request(run, requested_workers(run, n, cluster, array, resources)))


def preview(
    run: Run | str | Path,
    n: int | None = None,
    *,
    cluster: str | Cluster | None = None,
    array: bool = False,
    **resources: Unpack[Resources],
) -> str:
    """The script that :func:`submit_workers` would give to sbatch."""
    run = run if isinstance(run, Run) else Run.open(run)
    request = requested_workers(run, n, cluster, array, resources)
    if not isinstance(request, LocalRequest):
        return request.scripts[0].text
    return f"{_NO_SCRIPT}hpctk work {shlex.quote(str(run.root))} --workers {request.n}\n"


class WorkerJobs:
    """The jobs of a run's workers."""

    def __init__(self, run: Run, jobs: list[RunJob]) -> None:
        self.run = run
        self.jobs = jobs
        """Their records: ``job`` is the id."""
        self._job_states = JobStates(run.paths)

    @classmethod
    def open(cls, run: Run | str | Path) -> WorkerJobs:
        """Find all jobs that were ever submitted for a run. Raises RunError: there are none."""
        run = run if isinstance(run, Run) else Run.open(run)
        if not (found := read_jobs(run.paths)):
            msg = f"{run.root}: no workers were submitted"
            raise RunError(msg, hint="submit them with hpc_toolkit.notebook.submit_workers(run, n)")
        return cls(run, found)

    def states(self) -> dict[str, str]:
        """The state of every job, by its id: Slurm's word, or "unknown", which is not an error."""
        known = self._records()
        return {
            job.job: known[job.job].state if job.job in known else local_state(job)
            for job in self.jobs
        }

    def _records(self) -> dict[str, JobRecord]:
        ids = {job.job for job in self.jobs if not job.local}
        return {one.id: one for one in JobStates(self.run.paths).read() if one.id in ids}

    def status(self) -> Status:
        """The run's status; if it has no workers, the reason comes from the jobs."""
        return self.run.status(beside=Beside(reason=self._reason))

    def _reason(self, halt: Halt) -> str:
        if halt.kind != NO_WORKER:
            return halt.reason
        if here := [job for job in self.jobs if job.local and local_state(job) == RUNNING]:
            return (
                f"no worker is alive, and job {here[-1].job} runs here: its workers are "
                f"starting, or {here[-1].cwd}/{here[-1].log} tells why not"
            )
        return why(halt, self._job_states.read())

    def cancel(self) -> None:
        """Cancel the jobs; their workers first finish their item or give it back.

        A job whose name or user differs from the submitted one is left alone, and so is a local
        job of another process; a note says so.

        Raises SlurmError: Slurm did not do it.
        """
        for job in (job for job in self.jobs if job.local):
            if local_state(job) == RUNNING:
                PROCESSES[job.job].terminate()
            elif local_state(job) == UNKNOWN and self.living():
                all_of_them = f"'hpctk drain {self.run.root}' asks all workers of the run to leave"
                note(f"job {job.job} is not ours to end: {all_of_them}")
        queued = queued_jobs(job for job in self.jobs if not job.local)
        for one in queued:
            if one.foreign:
                note(f"job {one.record.id} was not cancelled: {one.foreign}")
        cancel_jobs(queued)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is complete, and return whether it is.

        Ends earlier when no job is left or after ``timeout`` seconds. Interrupting it stops no job.
        """
        return _follow(self.run.status, timeout, self.are_over).complete

    def watch(self, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, but show the run's status meanwhile.

        If the jobs are over and the run is not complete, it prints how the jobs ended.
        """
        complete = _follow(self.status, timeout, self.are_over, StatusDisplay()).complete
        if not complete and self.are_over():
            known = self._records()
            for job in self.jobs:
                ending = _ending(job, known.get(job.job), log_files(self.run.paths, job.job))
                sys.stdout.write(f"{ending}\n")
        return complete

    def are_over(self) -> bool:
        """Whether no job runs or waits any more; False if Slurm does not answer."""
        local = {local_state(job) for job in self.jobs if job.local}
        # Of a job that another process started, only the workers are known.
        if RUNNING in local or (UNKNOWN in local and self.living()):
            return False
        try:
            return not queued_jobs(job for job in self.jobs if not job.local)
        except slurm.SlurmError:
            return False

    def living(self) -> set[str]:
        return living_workers(self.run.view, SystemClock())

    def __repr__(self) -> str:
        return f"WorkerJobs({str(self.run.root)!r}, jobs={[job.job for job in self.jobs]})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(job)}</td><td>{html.escape(state)}</td></tr>"
            for job, state in self.states().items()
        )
        return f"{status_html(self.status())}<table>{rows}</table>"


def _ending(job: RunJob, record: JobRecord | None, logs: list[Path]) -> str:
    state = local_state(job) if record is None else record.state
    code = PROCESSES[job.job].returncode if job.job in PROCESSES else None
    code = code if record is None else record.exit_code
    ended = f", exit code {code}" if code else ""
    return printable(f"job {job.job}: {state}{ended}" + "".join(f"; see {log}" for log in logs))


def watch(run: Run | str | Path, timeout: float | None = None) -> Status:
    """Show a run's status until it is complete or ``timeout`` seconds are over; return the last.

    It does not end earlier, because more workers may start. Interrupting it stops no worker.
    """
    jobs = WorkerJobs(run if isinstance(run, Run) else Run.open(run), [])
    return _follow(jobs.status, timeout, lambda: False, StatusDisplay())


def _follow(
    look: Callable[[], Status],
    timeout: float | None,
    over: Callable[[], bool],
    display: StatusDisplay | None = None,
) -> Status:
    """Look until a run is complete, jobs are ``over``, or time is up; return the last status."""
    # Not when the first forecast needs it: people interrupt what they watch, and a process whose
    # import of numpy was interrupted cannot import it again.
    import numpy.random  # noqa: F401

    import hpc_toolkit.planning.reading  # noqa: F401

    start = time.monotonic()
    look_s, ask_s, ask_at = _LOOK_FIRST_S, _ASK_FIRST_S, start + _ASK_FIRST_S
    while True:
        now = time.monotonic()
        ended = now >= ask_at and over()
        if now >= ask_at:
            ask_s = min(2 * ask_s, _ASK_LAST_S)
            ask_at = now + ask_s
        status = look()
        if display is not None:
            display.show(status)
        late = timeout is not None and now - start >= timeout
        if status.complete or ended or late:
            return status
        time.sleep(look_s)
        look_s = min(2 * look_s, _LOOK_LAST_S)


def report(run: Run | str | Path) -> Page:
    """The report of 'hpctk report', as the last line of a cell; the saved notebook keeps it."""
    from hpc_toolkit.submit.reporting import report_of

    return Page(report_of(run if isinstance(run, Run) else Run.open(run)))


@dataclass(frozen=True, slots=True)
class Page:
    """A complete page in a frame of a notebook; it cannot reach the notebook around it."""

    html: str

    def _repr_html_(self) -> str:
        frame = "width:100%;height:40rem;border:1px solid #757575"
        inner = html.escape(self.html)
        return f'<iframe sandbox="allow-scripts" style="{frame}" srcdoc="{inner}"></iframe>'


@dataclass(slots=True)
class _Wanted:
    request: Submission | LocalRequest
    jobs: WorkerJobs
    count: int = 1
    """How many of its jobs, or arrays, there must be."""
    is_sent: bool = False

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
        self._look_at, self._noted = time.monotonic() + _SILENT_S, False

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
            live = [job for job in known if job.job in queued or local_state(job) == RUNNING]
            each = 1 if isinstance(wanted.request, LocalRequest) else len(wanted.request.scripts)
            if live:
                ids = ", ".join(job.job for job in live)
                note(f"{self._run.root} has job {ids} of this request: it is not sent again")
            wanted.jobs.jobs[:] = live
            for _ in range(wanted.count - len(live) // each):
                wanted.jobs.jobs += send_request(self._run, wanted.request)
            wanted.is_sent = True
        self._look_at, self._noted = time.monotonic() + _SILENT_S, False

    @property
    def _jobs(self) -> WorkerJobs:
        return WorkerJobs(self._seen, [job for one in self._wanted for job in one.jobs.jobs])

    def line(self) -> str:
        """The workers and the time left, or what the jobs wait for."""
        now = self._jobs.status()
        return now.reason if not now.workers.alive else one_line(now).partition("; ")[2]

    def look(self, shown: Path, since: float) -> None:
        """Say how the jobs ended if no worker is left, and there is no result ``since`` a time."""
        if self._noted or time.monotonic() < max(self._look_at, since + _SILENT_S):
            return
        self._look_at = time.monotonic() + _SILENT_S
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
