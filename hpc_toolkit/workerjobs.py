"""Slurm jobs whose workers make the calls of an executor."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.report.panel import one_line
from hpc_toolkit.results.progress import NO_WORKER
from hpc_toolkit.results.status import Beside, Status
from hpc_toolkit.results.workers import living_workers
from hpc_toolkit.run import Run
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.slurm.render.directives import complete
from hpc_toolkit.slurm.render.file import read_sbatch
from hpc_toolkit.slurm.render.spec import DEFAULTS, ScriptSpec, read_spec
from hpc_toolkit.slurm.render.values import PASSED
from hpc_toolkit.submit import JobStates, RunJob, read_jobs
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
from hpc_toolkit.submit.submission import Submission, of_request
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note

MAX_RANKS = 65536
"""Largest number of workers in one call; more is a mistake."""
_SILENT_S = 60.0
"""Seconds without a result of a call after which Slurm is asked whether the jobs have ended."""


class Resources(TypedDict, total=False):
    """Resources of a job, named as in ``hpctk render``; None leaves the choice to the cluster."""

    job_name: str | None
    account: str | None
    partition: str | None
    qos: str | None
    reservation: str | None
    constraint: str | None
    nodelist: str | None
    prefer: str | None
    exclude: str | None
    licenses: str | None
    wckey: str | None
    nodes: int | None
    ntasks_per_node: int | None
    gpus_per_node: int | None
    gpu_type: str | None
    isolate_gpus: bool | None
    cpus_per_task: int | None
    mem: str | None
    """Of each node; sizes are text with a unit, such as "480G", and "0" is all of the memory."""
    mem_per_cpu: str | None
    mem_per_gpu: str | None
    exclusive: bool | str | None
    time: str | int | None
    """Time limit: minutes, or text as sbatch reads it."""
    dependency: str | None
    requeue: bool | None
    max_restarts: int | None
    comment: str | None
    mail_type: str | None
    mail_user: str | None
    modules: Sequence[str] | None
    setup: Sequence[str] | None
    env: dict[str, str] | None
    conda: str | None
    venv: str | None
    container: str | None
    bind: Sequence[str] | None
    node_setup: Sequence[str] | None
    teardown: Sequence[str] | None
    gres: str | None
    time_min: str | None
    idle_exit: str | None
    output: str | None
    chdir: str | None
    sbatch: Sequence[str] | None
    """Any other option of sbatch, such as "gpu-freq=low"."""


def _requested(resources: Resources) -> ScriptSpec:
    """Check the resources and turn them into the request for a script.

    Raises ConfigError, RenderError: an unknown resource, or a value that no script could contain.
    """
    given: dict[str, Any] = {key: value for key, value in resources.items() if value is not None}
    known = list(Resources.__annotations__)
    for word in given:
        if word not in known:
            msg = f"{word}: unknown resource"
            raise ConfigError(msg, hint=near_miss(word.removeprefix("slurm_"), known))
    if type(given.get("time")) is int:  # True is not a time
        given["time"] = str(given["time"])
    lists = {word: (list, tuple) for word in known if type(DEFAULTS.get(word)) is tuple}
    kinds: dict[str, Any] = {**lists, "env": (dict,)}
    for word, wanted in kinds.items():
        value = given.get(word, wanted[0]())
        if not isinstance(value, wanted):
            msg = f"{word}: {value!r} is not a {wanted[0].__name__}"
            raise ConfigError(msg, hint="such as modules=['cuda/12'] or env={'NAME': 'value'}")
        given[word] = tuple(value.items() if isinstance(value, dict) else value)
    passed = tuple(
        f"{name}={given.pop(word)}" for name in PASSED if (word := name.replace("-", "_")) in given
    )
    others = read_sbatch([str(text) for text in given.pop("sbatch")], "sbatch")
    for word in others.keys() & given.keys():
        msg = f"{word} is given twice: also in sbatch"
        raise ConfigError(msg, hint="leave one of them out")
    # Not resolved: Python uses a virtual environment only if it is started by the link in it.
    python = os.path.abspath(sys.executable)
    sbatch = (*others.pop("sbatch", ()), *passed)
    return read_spec({"python": python, **given, **others, "sbatch": sbatch})


def request(
    run: Run, n: int | None, cluster: str | Cluster | None, resources: Resources
) -> Submission:
    """Check a request for one job of ``n`` workers of a run.

    Raises ConfigError, RenderError: no job can be like this.
    """
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_RANKS):
        msg = f"n: {n!r} is not a number of workers"
        raise ConfigError(msg, hint=f"a whole number from 1 to {MAX_RANKS}")
    spec = _requested(resources)
    if isinstance(cluster, Cluster):
        site = cluster
    else:
        found = resolve_cluster(cluster)
        sys.stderr.writelines(f"note: {text}\n" for text in found.notes)
        site = found.cluster
    if n is not None:
        ranks, nodes = spec.ntasks_per_node, spec.nodes
        if resources.get("nodes") is None:
            ranks = ranks or spec.gpus_per_node or n
            nodes = max(1, n // ranks)
        spec = replace(spec, nodes=nodes, ntasks_per_node=ranks or max(1, n // nodes))
    per_node = complete(spec, site).ntasks_per_node or 1
    if n not in (None, spec.nodes * per_node):
        msg = f"n: {n} workers are not {counted(spec.nodes, 'node')} x {per_node} ranks"
        raise ConfigError(msg, hint="change n, nodes or ntasks_per_node")
    check_directory(site, Path.cwd())
    spec = replace(spec, run=str(run.root.absolute()))
    return of_request(spec, site, "work-queue", run=run, cwd=Path.cwd())


def submit(run: Run, made: Submission) -> list[RunJob]:
    """Submit what was requested. Raises RunError, SlurmError: nothing more was submitted."""
    check_run(run)
    note_overrides()
    found = without_failed_nodes(made)
    for text in found.notes:
        note(text)
    return list(send(found))


@dataclass(slots=True)
class _Wanted:
    submission: Submission
    jobs: list[RunJob] = field(default_factory=list)
    count: int = 1
    """How many of its jobs there must be."""
    is_sent: bool = False

    def is_of(self, job: RunJob) -> bool:
        """Whether a job was submitted by this request, perhaps by an earlier process."""
        # The name of the run's copy of a script has a checksum of its text.
        return job.script.rpartition("/")[2] == self.submission.place.name


class CallJobs:
    """Jobs of workers for calls, which one thread requests, and another follows and ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._seen = Run(run.root, run.manifest)  # a view serves one thread
        self._states = JobStates(run.paths)
        self._wanted: list[_Wanted] = []
        self._look_at, self._noted = time.monotonic() + _SILENT_S, False

    def want(
        self, n: int | None, cluster: str | Cluster | None, resources: Resources, *, again: bool
    ) -> list[RunJob]:
        """Check a request, which :meth:`send` sends; ``again``: beside equal ones before it."""
        made = request(self._run, n, cluster, resources)
        found = next((one for one in self._wanted if one.submission == made), None)
        if found is None:
            found = _Wanted(made)
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
            queued = {one.record.id for one in queued_jobs(known) if not one.foreign}
            live = [job for job in known if job.job in queued]
            if live:
                ids = ", ".join(job.job for job in live)
                note(f"{self._run.root} has job {ids} of this request: it is not sent again")
            wanted.jobs[:] = live
            for _ in range(wanted.count - len(live)):
                wanted.jobs += submit(self._run, wanted.submission)
            wanted.is_sent = True
        self._look_at, self._noted = time.monotonic() + _SILENT_S, False

    @property
    def _jobs(self) -> list[RunJob]:
        return [job for one in self._wanted for job in one.jobs]

    def line(self) -> str:
        """The workers and the time left, or what the jobs wait for."""

        def reason(now: Status) -> str:
            return why(now, self._states.read()) if now.halt == NO_WORKER else now.reason

        now = self._seen.status(beside=Beside(reason=reason))
        return now.reason if not now.workers.alive else one_line(now).partition("; ")[2]

    def look(self, shown: Path, since: float) -> None:
        """Say how the jobs ended if no worker is left, and there is no result ``since`` a time."""
        if self._noted or time.monotonic() < max(self._look_at, since + _SILENT_S):
            return
        self._look_at = time.monotonic() + _SILENT_S
        jobs = self._jobs
        try:
            ended = jobs and not queued_jobs(jobs)
        except SlurmError:
            return
        if ended and not living_workers(self._seen.view, SystemClock()):
            self._noted = True
            known = {one.id: one.state for one in self._states.read()}
            states = ", ".join(f"{one.job} {known.get(one.job, UNKNOWN)}" for one in jobs)
            hint = "the same call of slurm() sends another, also when the script is started again"
            note(f"{shown}: calls are left, and its jobs have ended ({states}); {hint}")

    def end(self) -> None:
        """Cancel jobs that have not started, and jobs whose workers have not."""
        started = {
            one.job
            for one in self._seen.view.presences().values()
            if one is not None and one.state != FINISHED
        }
        queued = queued_jobs(self._jobs)
        cancel_jobs(one for one in queued if one.record.waiting or one.record.id not in started)
