"""Requests for workers: resources with the names and checks of ``hpctk render``, sent or started.

A request is submitted to Slurm as ``hpctk submit`` does, or its workers start on this machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from hpc_toolkit.errors import ConfigError, near_miss
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.slurm.render.directives import complete
from hpc_toolkit.slurm.render.spec import DEFAULTS, ScriptSpec, read_spec
from hpc_toolkit.slurm.render.values import PASSED
from hpc_toolkit.submit.jobs import RunJob, own_login, record_job
from hpc_toolkit.submit.send import (
    check_directory,
    check_run,
    note_overrides,
    send,
    without_failed_nodes,
)
from hpc_toolkit.submit.submission import Submission, of_request
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.processes import die_with_parent
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.ranks import without_rank
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

LOCAL = "local"
"""The cluster name for this machine: the same calls, without Slurm."""
MAX_RANKS = 65536
"""Largest number of workers in one call; more is a mistake."""
RUNNING, FINISHED = "RUNNING", "FINISHED"
PROCESSES: dict[str, subprocess.Popen[bytes]] = {}  # of local jobs, by their ids


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


def resolved(cluster: str | Cluster | None) -> Cluster | None:
    """The facts of a ``cluster``; None for this machine.

    Raises ConfigError: no such cluster.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if (cluster or os.environ.get("HPCTK_CLUSTER")) == LOCAL:
        return None
    found = resolve_cluster(cluster)
    sys.stderr.writelines(f"note: {note}\n" for note in found.notes)
    return found.cluster


def requested(resources: Resources) -> ScriptSpec:
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
    # Not resolved: Python uses a virtual environment only if it is started by the link in it.
    python = os.path.abspath(sys.executable)
    return read_spec({"python": python, **given, "sbatch": (*given["sbatch"], *passed)})


class LocalRequest(NamedTuple):
    """Workers on this machine."""

    n: int
    spec: ScriptSpec


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
    indices = f"0-{n // ranks - 1}" if n > ranks else None
    spec = replace(spec, run=str(run.root.absolute()), array=indices)
    template = "array" if indices else "work-queue"
    return of_request(spec, site, template, run=run, cwd=Path.cwd())


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
    PROCESSES[job.job] = process
    record_job(run.paths, job)
    return job


def local_state(job: RunJob) -> str:
    """``RUNNING``, ``FINISHED``, ``INTERRUPTED``, or "unknown" if another process started it."""
    process = PROCESSES.get(job.job)
    if process is None:
        return UNKNOWN
    return {None: RUNNING, 0: FINISHED}.get(process.poll(), "INTERRUPTED")
