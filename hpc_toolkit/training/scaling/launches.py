"""The launches of a scaling run, one for each world size, on this machine, and its Slurm jobs."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpc_toolkit.errors import PASSING, ConfigError, RunError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.submit.jobs import JobStates, read_jobs
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.training.scaling.recorder import CLUSTER, RECORDS, REPEAT
from hpc_toolkit.training.scaling.records import DIRECTORY


def prepare(directory: Path) -> None:
    """Create the directory and write to it.

    Raises:
        ConfigError: the directory cannot be created or written to.
        OSError: there is no room, or the filesystem does not answer; a later call may succeed.
    """
    try:
        (directory / DIRECTORY).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in PASSING:
            raise
        message = f"-o {directory}: cannot be written to: {error.strerror}"
        raise ConfigError(message, hint="name a directory that all nodes can write to") from error


def hosts_of(world_size: int, per_host: int) -> int:
    """Return the number of hosts of the ranks. Raises ConfigError if the last one is not full."""
    if world_size > per_host and world_size % per_host:
        message = f"--world-sizes: {world_size} ranks do not fill nodes of {per_host}"
        raise ConfigError(message, hint=f"use multiples of {per_host}, or set --ranks-per-node")
    return max(1, world_size // per_host)


def measure_own(
    directory: Path,
    program: Sequence[str],
    world_size: int,
    repeat: int,
    *,
    backend: str | None = None,
) -> None:
    """Run a training, a script or ``-m MODULE``, on this machine's ranks, with output to files.

    Its `Recorder` adds a record to ``directory``. Raises RunError: it ended with another code than
    0; ConfigError: it has recorded nothing; and what a launch raises.
    """
    from hpc_toolkit.training.launch import launcher
    from hpc_toolkit.training.launch.plan import Request

    path = directory / DIRECTORY / f"world-{world_size}.jsonl"
    before = path.stat().st_size if path.exists() else 0
    os.environ.update({RECORDS: str(path), REPEAT: str(repeat)})
    module = program[0] == "-m"
    script, *arguments = program[1:] if module else program
    outcome = launcher.launch(
        Request(
            script=script,
            arguments=tuple(arguments),
            options={"module": module, "redirects": "3", "nproc_per_node": world_size},
            backend=backend,
            run_dir=directory,
        )
    )
    if outcome.error is not None:
        raise outcome.error
    name = shlex.join(program)
    if outcome.code:
        message = f"{name} ended with exit code {outcome.code} on {counted(world_size, 'rank')}"
        raise RunError(message, hint=f"{directory}/logs has the output of the ranks")
    if not path.exists() or path.stat().st_size == before:
        message = f"{name} recorded no speed on {counted(world_size, 'rank')}"
        hint = "use hpc_toolkit.training.scaling.recorder.Recorder in its loop"
        raise ConfigError(message, hint=hint)


def cluster_name(option: str | None) -> str:
    """Return what records call the cluster of a job; "" for one of which nothing is known.

    Raises ConfigError if the cluster cannot be loaded.
    """
    from hpc_toolkit.slurm.clusters.choice import FALLBACK, resolve_cluster

    site = resolve_cluster(option).cluster
    if site.name == FALLBACK:
        return ""
    named = site.argument or site.name
    return os.path.abspath(named) if "/" in named or named.endswith(".toml") else named


class Job(NamedTuple):
    """One job of a scaling run."""

    world_size: int
    name: str
    """End of the job's name, from which :func:`refuse_twice` reads the world size."""
    env: tuple[str, ...]
    """``NAME=VALUE`` of each variable that the script needs."""


def own_jobs(directory: Path, missing: Iterable[tuple[int, int]], *, cluster: str) -> list[Job]:
    """Return one job for each world size and repeat. ``cluster`` is "" if it is unknown.

    Each job appends to a file of its own: jobs of one world size may end at the same time on
    different nodes.
    """
    found = []
    for size, repeat in missing:
        path = directory / DIRECTORY / f"world-{size}-repeat-{repeat}.jsonl"
        env = {RECORDS: str(path), REPEAT: str(repeat), CLUSTER: cluster}
        words = tuple(f"{name}={value}" for name, value in env.items() if value)
        found.append(Job(size, f"repeat-{repeat}-{size}", words))
    return found


def job_request(
    directory: Path, world_size: int, per_node: int, *, gpus: str, launch: str | None
) -> tuple[str, dict[str, Any]]:
    """Return the template and the options of a job.

    ``per_node`` is the number of ranks per node, and ``gpus`` is ``[TYPE:]N`` of a full node, ""
    for none. Fewer ranks request fewer GPUs, or the smallest world size would be charged for a full
    node. ``launch`` is how ranks are started; None for the template's default.

    Raises ConfigError if the last node would have fewer ranks than the others.
    """
    nodes = hosts_of(world_size, per_node)
    values: dict[str, Any] = {
        "nodes": nodes,
        "nproc_per_node": min(world_size, per_node),
        "run_dir": str(directory),
        "launch": launch,
        # A restarted rank would fail again, or measure a machine that was just disturbed.
        "rank_restarts": None if launch == "task-per-gpu" else 0,
    }
    kind, _, count = gpus.rpartition(":")
    if gpus:
        few = count.isdecimal() and 0 < world_size < int(count)
        asked = str(world_size) if few else count
        values["gpus_per_node"] = f"{kind}:{asked}" if kind else asked
    # A count of 0 requests no GPUs.
    template = "train-multi-gpu" if nodes == 1 and gpus and count != "0" else "train-multi-node"
    return template, values


def refuse_twice(directory: Path, world_sizes: Sequence[int]) -> None:
    """Reject world sizes for which a job of this directory is in the queue or running.

    Jobs that Slurm does not report are ignored, since Slurm forgets ended jobs after some time.

    Raises RunError if there are such jobs; the message names them.
    """
    paths = RunPaths(directory)
    sizes = {job.job: job.name.rpartition("-")[2] for job in read_jobs(paths)}
    asked = {str(size) for size in world_sizes}
    there = {
        one.id: f"{one.id} ({one.state}, world size {sizes[one.id]})"
        for one in JobStates(paths).read()
        if not one.ended and one.state != UNKNOWN and sizes.get(one.id) in asked
    }
    if there:
        message = f"{directory}: it has jobs in the queue: {', '.join(there.values())}"
        ids = " ".join(there)
        hint = f"wait for them; 'scancel {ids}' cancels them; --force submits again"
        raise RunError(message, hint=hint)
