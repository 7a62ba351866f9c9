"""Submit workers of a run to Slurm, as ``hpctk submit`` does, or start them here; follow them."""

from __future__ import annotations

import html
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.notebook.resources import Resources, requested, resolved
from hpc_toolkit.report.notebook import StatusDisplay, status_html
from hpc_toolkit.results.progress import NO_WORKER
from hpc_toolkit.results.status import Beside
from hpc_toolkit.results.workers import living_workers
from hpc_toolkit.run import Run
from hpc_toolkit.slurm import client as slurm
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.slurm.render.directives import complete
from hpc_toolkit.submit.jobs import JobStates, RunJob, log_files, own_login, read_jobs, record_job
from hpc_toolkit.submit.send import (
    cancel_jobs,
    check_directory,
    check_run,
    note_overrides,
    queued_jobs,
    send,
    without_failed_nodes,
)
from hpc_toolkit.submit.standstill import why
from hpc_toolkit.submit.submission import of_request
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.ranks import without_rank
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.results.status import Halt, Status
    from hpc_toolkit.slurm.clusters.facts import Cluster
    from hpc_toolkit.slurm.records import JobRecord
    from hpc_toolkit.slurm.render.spec import ScriptSpec
    from hpc_toolkit.submit.submission import Submission

MAX_RANKS = 65536
"""Largest number of workers in one call; more is a mistake."""
RUNNING, FINISHED = "RUNNING", "FINISHED"
_LOOK_FIRST_S, _LOOK_LAST_S, _ASK_FIRST_S, _ASK_LAST_S = 0.2, 2.0, 2.0, 60.0
_NO_SCRIPT = "# processes on this machine; nothing is given to sbatch\n"
_PROCESSES: dict[str, subprocess.Popen[bytes]] = {}  # of local jobs, by their ids


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


class LocalRequest(NamedTuple):
    n: int
    spec: ScriptSpec


"""Workers on this machine."""


def requested_workers(
    run: Run, n: int | None, cluster: str | Cluster | None, array: bool, resources: Resources
) -> Submission | LocalRequest:
    """Check a request for workers, as :func:`submit_workers` takes it."""
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_RANKS):
        msg = f"n: {n!r} is not a number of workers"
        raise ConfigError(msg, hint=f"a whole number from 1 to {MAX_RANKS}")
    spec, site = requested(resources), resolved(cluster)
    if site is None:
        return LocalRequest(n or _here(spec), spec)
    if n is not None:
        spec = _shaped(spec, n, array=array, any_nodes=resources.get("nodes") is None)
    per_node = complete(spec, site).ntasks_per_node or 1
    ranks = spec.nodes * per_node
    n = n or ranks
    if n % ranks or (n != ranks and not array):
        msg = f"n: {n} workers are not {counted(spec.nodes, 'node')} x {per_node} ranks"
        hint = "change n, nodes or ntasks_per_node; array=True submits several such jobs"
        raise ConfigError(msg, hint=hint)
    check_directory(site, Path.cwd())
    return submission(run, spec, site, elements=n // ranks)


def _here(spec: ScriptSpec) -> int:
    """How many workers a request means on this machine."""
    if spec.nodes > 1:
        msg = f"nodes: {spec.nodes} nodes were requested, but this machine is one node"
        raise ConfigError(msg, hint="on a cluster, name it, such as cluster='generic'")
    return spec.ntasks_per_node or spec.gpus_per_node or 1


def send_request(run: Run, request: Submission | LocalRequest) -> list[RunJob]:
    """Submit what was requested. Raises RunError, SlurmError: nothing more was submitted."""
    check_run(run)
    if isinstance(request, LocalRequest):
        return [_start_here(run, request.n, request.spec)]
    note_overrides()
    found = without_failed_nodes(request)
    for text in found.notes:
        note(text)
    return list(send(found))


def submission(run: Run, spec: ScriptSpec, site: Cluster, *, elements: int = 1) -> Submission:
    """The job of a run's workers, or their array."""
    array = f"0-{elements - 1}" if elements > 1 else None
    spec = replace(spec, run=str(run.root.absolute()), array=array)
    template = "array" if array else "work-queue"
    return of_request(spec, site, template, run=run, cwd=Path.cwd())


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


def _shaped(spec: ScriptSpec, n: int, *, array: bool, any_nodes: bool) -> ScriptSpec:
    """The request with nodes and ranks per node for ``n`` workers, or for one job of an array."""
    ranks, nodes, gpus = spec.ntasks_per_node, spec.nodes, spec.gpus_per_node
    if array:
        ranks = ranks or gpus or 1
    elif any_nodes:
        ranks = ranks or gpus or n
        nodes = max(1, n // ranks)
    return replace(spec, nodes=nodes, ntasks_per_node=ranks or max(1, n // nodes))


def _start_here(run: Run, n: int, spec: ScriptSpec) -> RunJob:
    """Start ``n`` workers in a process of their own, which leaves with this one."""
    argv = [sys.executable, "-Pm", "hpc_toolkit", "work", str(run.root.absolute())]
    argv += ["--workers", str(n), *([f"--deadline={spec.time}s"] if spec.time else [])]
    environ = without_rank()
    # A notebook may itself run in an srun step; its local workers are not ranks of that step.
    environ.pop("SLURM_STEP_ID", None)
    if spec.gpus_per_node is not None:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus()[: spec.gpus_per_node])
    now = time.time()
    run.paths.jobs.mkdir(exist_ok=True)
    log = run.paths.jobs / f"local-{now:.3f}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # A notebook's interrupt reaches its kernel's process group, and is not for workers.
            process_group=0,
            # It only makes a system call, which is safe beside threads.
            preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
        )
    job = RunJob(
        job=str(process.pid),
        name=spec.job_name,
        by=own_login(),
        cwd=str(log.parent),
        log=log.name,
        submitted=round(now, 3),
        workers=n,
        local=True,
    )
    _PROCESSES[job.job] = process
    record_job(run.paths, job)
    return job


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
                _PROCESSES[job.job].terminate()
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


def local_state(job: RunJob) -> str:
    """``RUNNING``, ``FINISHED``, ``INTERRUPTED``, or "unknown" if another process started it."""
    process = _PROCESSES.get(job.job)
    if process is None:
        return UNKNOWN
    return {None: RUNNING, 0: FINISHED}.get(process.poll(), "INTERRUPTED")


def _ending(job: RunJob, record: JobRecord | None, logs: list[Path]) -> str:
    state = local_state(job) if record is None else record.state
    code = _PROCESSES[job.job].returncode if job.job in _PROCESSES else None
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
