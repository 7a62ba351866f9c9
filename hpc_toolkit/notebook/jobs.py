"""The jobs of a run's submitted workers: found again by the run, followed and cancelled."""

from __future__ import annotations

import html
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.notebook.executors import LOCAL
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.report.notebook import StatusDisplay, status_html
from hpc_toolkit.results.progress import NO_WORKER
from hpc_toolkit.results.status import Beside
from hpc_toolkit.results.workers import living_workers
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.slurm.render.values import parse_array
from hpc_toolkit.submit.jobs import (
    JobStates,
    RunJob,
    known_jobs,
    own_login,
    read_jobs,
    record_job,
)
from hpc_toolkit.submit.send import cancel_jobs, queued_jobs
from hpc_toolkit.submit.standstill import why
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.results.status import Halt, Status
    from hpc_toolkit.slurm.records import JobRecord

_LOOK_FIRST_S, _LOOK_LAST_S = 0.2, 2.0
_ASK_FIRST_S, _ASK_LAST_S = 2.0, 60.0
_JOBS_SHOWN = 20
RUNNING = "RUNNING"


def watch(run: Run | str | Path, timeout: float | None = None) -> Status:
    """Show a run's status until it is complete or ``timeout`` seconds are over; return the last.

    It does not end earlier, because more workers may start. Interrupting it stops no worker.
    """
    found = run if isinstance(run, Run) else Run.open(run)
    states = JobStates(found.paths)
    return follow(lambda: _stand(found, states), timeout, lambda: False, StatusDisplay())


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


def _stand(run: Run, states: JobStates) -> Status:
    """A run's status; if it has no workers, the reason comes from its jobs in Slurm."""
    return run.status(beside=Beside(reason=partial(_reason, states)))


def _reason(states: JobStates, halt: Halt) -> str:
    return why(halt, states.read()) if halt.kind == NO_WORKER else halt.reason


def submission_folder(run: Run) -> Path:
    return run.root.absolute() / "submitit"


class WorkerJobs:
    """The jobs of a run's workers."""

    def __init__(self, run: Run, jobs: list[Any]) -> None:
        self.run = run
        self.jobs = jobs
        """submitit's jobs; ``job.results()`` waits for a job and returns its ranks' exit codes."""
        self._job_states = JobStates(run.paths)

    @classmethod
    def submitted(cls, run: Run, workers: int, executor: Any, jobs: list[Any]) -> WorkerJobs:
        """Record jobs that were just submitted, so that they can be found again."""
        local = executor.cluster == LOCAL
        elements = Counter(job.job_id.partition("_")[0] for job in jobs)
        ids, now = {job.job_id for job in jobs}, round(time.time(), 3)
        for job, count in elements.items():
            array = f"0-{count - 1}" if f"{job}_0" in ids else None
            record = RunJob(
                job=job,
                # submitit's own default, if the executor was given none.
                name=executor.parameters.get("job_name", "submitit"),
                by=own_login(),
                array=array,
                cwd=str(executor.folder),
                log="%A_%a_0_log.out" if array else "%j_0_log.out",
                submitted=now,
                workers=workers // len(jobs),
                local=local,
            )
            record_job(run.paths, record)
        return cls(run, jobs)

    @classmethod
    def open(cls, run: Run | str | Path) -> WorkerJobs:
        """Find all jobs that were ever submitted for a run from a notebook.

        Raises RunError: there are none.
        """
        run = run if isinstance(run, Run) else Run.open(run)
        found = [one for job in read_jobs(run.paths) if job.workers for one in _reopen(job)]
        if not found:
            msg = f"{run.root}: no workers were submitted from a notebook"
            raise RunError(msg, hint="submit them with hpc_toolkit.notebook.submit_workers(run, n)")
        return cls(run, found)

    def states(self) -> dict[str, str]:
        """The state of every job, by its id: Slurm's word, or "unknown", which is not an error.

        A job with a living worker is ``RUNNING``; Slurm is asked once for all others.
        """
        read = (read_presence(self.run.paths.worker(name)) for name in self._living())
        living = {presence.job for presence in read if presence is not None}
        found = {job: RUNNING if job in living else UNKNOWN for job in self._in_slurm()}
        silent = [job for job, state in found.items() if state == UNKNOWN]
        if silent:
            found |= {job: record.state for job, record in slurm.job_states(silent).items()}
        found |= {job.job_id: local_state(job) for job in self._local()}
        return {job.job_id: found[job.job_id] for job in self.jobs}

    def status(self) -> Status:
        """The run's status; if it has no workers, the reason comes from the jobs."""
        return self.run.status(beside=Beside(reason=self._reason))

    def _reason(self, halt: Halt) -> str:
        here = [job for job in self._local() if local_state(job) == RUNNING]
        if halt.kind != NO_WORKER or not here:
            return _reason(self._job_states, halt)
        return (
            f"no worker is alive, and job {here[-1].job_id} runs here: its workers are "
            f"starting, or {here[-1].paths.stderr} tells why not"
        )

    def cancel(self) -> None:
        """Cancel the jobs; their workers first finish their item or give it back.

        A job whose name or user differs from the submitted one is left alone, and so is a local
        job that was found again by :meth:`open`; a note says so.

        Raises SlurmError: Slurm did not do it.
        """
        for job in self._local():
            if local_state(job) == RUNNING:
                # A child of this process, so its id is not another process's.
                os.kill(int(job.job_id), signal.SIGTERM)
            elif local_state(job) == UNKNOWN and self._living():
                sys.stderr.write(
                    f"note: job {printable(job.job_id)} is not ours to end: 'hpctk drain "
                    f"{self.run.root}' asks all workers of the run to leave\n"
                )
        known = {job.job: job for job in known_jobs(self.run.paths)}
        ids = dict.fromkeys(job.partition("_")[0] for job in self._in_slurm())
        # Of a job that could not be recorded, only the id is known.
        queued = queued_jobs(known.get(one) or RunJob(job=one) for one in ids)
        for job in queued:
            if job.foreign:
                said = printable(f"note: job {job.record.id} was not cancelled: {job.foreign}")
                sys.stderr.write(f"{said}\n")
        cancel_jobs(queued)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the run is complete, and return whether it is.

        Ends earlier when no job is left or after ``timeout`` seconds. Interrupting it stops no job.
        """
        return follow(self.run.status, timeout, self._over).complete

    def watch(self, timeout: float | None = None) -> bool:
        """Like :meth:`wait`, but show the run's status meanwhile.

        If the jobs are over and the run is not complete, it prints how the jobs ended.
        """
        complete = follow(self.status, timeout, self._over, StatusDisplay()).complete
        if not complete and self._over():
            sys.stdout.writelines(f"{printable(line)}\n" for line in self._endings())
        return complete

    def _endings(self) -> list[str]:
        """One line per job about its end, failed jobs first; at most 20 jobs."""
        records = slurm.job_states(self._in_slurm())
        ended = [(job, records.get(job.job_id)) for job in self.jobs]
        ranked = sorted(ended, key=lambda one: one[1] is not None and one[1].state == "COMPLETED")
        lines = [_ending(*one) for one in ranked[:_JOBS_SHOWN]]
        more = len(ranked) - len(lines)
        return lines + ([f"and {counted(more, 'more job')}"] if more else [])

    def _over(self) -> bool:
        """Whether no job runs or waits any more; False if Slurm does not answer."""
        local = set(map(local_state, self._local()))
        # Of a job that an earlier process started, only the workers are known.
        if RUNNING in local or (UNKNOWN in local and self._living()):
            return False
        ids = self._in_slurm()
        try:
            known = slurm.squeue(ids)
        except slurm.SlurmError:
            return False
        return all(job not in known or known[job].ended for job in ids)

    def _living(self) -> set[str]:
        return living_workers(self.run.view, SystemClock())

    def _in_slurm(self) -> list[str]:
        return [job.job_id for job in self.jobs if not is_local(job)]

    def _local(self) -> list[Any]:
        return [job for job in self.jobs if is_local(job)]

    def __repr__(self) -> str:
        ids = [job.job_id for job in self.jobs[:_JOBS_SHOWN]]
        return f"WorkerJobs({str(self.run.root)!r}, jobs={ids})"

    def _repr_html_(self) -> str:
        shown = list(self.states().items())[:_JOBS_SHOWN]
        rows = "".join(
            f"<tr><td>{html.escape(job)}</td><td>{html.escape(state)}</td></tr>"
            for job, state in shown
        )
        more = len(self.jobs) - len(shown)
        rest = f"<div>and {more} more</div>" if more else ""
        return f"{status_html(self.status())}<table>{rows}</table>{rest}"


def follow(
    look: Callable[[], Status],
    timeout: float | None,
    over: Callable[[], bool],
    display: StatusDisplay | None = None,
) -> Status:
    """Wait until a run is complete, nothing works on it, or time is up; return the last status.

    ``look`` returns the run's status, and ``over`` whether nothing works on it any more.
    """
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


def _ending(job: Any, record: JobRecord | None) -> str:
    state = local_state(job) if record is None else record.state
    parts = [f"job {job.job_id}: {state}"]
    if record is not None and record.exit_code:
        parts.append(f"exit code {record.exit_code}")
    stderr = job.paths.stderr
    return "; ".join([", ".join(parts), *([f"see {stderr}"] if stderr.exists() else [])])


def _reopen(job: RunJob) -> list[Any]:
    """The job, or the elements of the array, as submitit's objects."""
    import submitit

    ids = [job.job]
    if job.array is not None:
        ids = [f"{job.job}_{at}" for part in parse_array(job.array, "").ranges for at in part]
    kind = submitit.LocalJob if job.local else submitit.SlurmJob
    # A local job is one task, which starts all workers.
    tasks = range(1 if job.local else job.workers)
    return [kind(folder=job.cwd, job_id=one, tasks=tasks) for one in ids]


def is_local(job: Any) -> bool:
    """Whether a submitit job runs as local processes and not in Slurm."""
    return type(job).__name__ == "LocalJob"


def local_state(job: Any) -> str:
    """``RUNNING``, ``FINISHED``, ``INTERRUPTED``, or "unknown": without a result, and started by
    another process or found again, so that submitit does not know its process.
    """
    state = str(job.state)
    return state if state in (RUNNING, "FINISHED", "INTERRUPTED") else UNKNOWN
