"""The Slurm jobs of a scaling run: what each of them requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.submit.jobs import JobStates, read_jobs
from hpc_toolkit.training.scaling.launches import MODULE, hosts_of
from hpc_toolkit.training.scaling.recorder import CLUSTER, RECORDS, REPEAT
from hpc_toolkit.training.scaling.records import DIRECTORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from hpc_toolkit.training.scaling.launches import ScalingRun


class Job(NamedTuple):
    """One job of a scaling run."""

    world_size: int
    name: str
    """End of the job's name, from which :func:`refuse_twice` reads the world size."""
    command: tuple[str, ...]
    """Script or ``-m MODULE``, with arguments."""
    env: tuple[str, ...] = ()
    """``NAME=VALUE`` of each variable that the script needs."""


def built_in_jobs(run: ScalingRun) -> list[Job]:
    """Return one job for each world size, which makes all measurements of it."""
    command = ("-m", MODULE, *run.words())
    return [Job(size, f"{size}", command) for size in run.world_sizes]


def own_jobs(
    directory: Path,
    program: Sequence[str],
    missing: Iterable[tuple[int, int]],
    *,
    cluster: str,
) -> list[Job]:
    """Return one job for each world size and repeat of a user's training.

    Each job appends to a file of its own: jobs of one world size may end at the same time on
    different nodes. ``cluster`` is "" if it is unknown.
    """
    found = []
    for size, repeat in missing:
        path = directory / DIRECTORY / f"world-{size}-repeat-{repeat}.jsonl"
        env = {RECORDS: str(path), REPEAT: str(repeat), CLUSTER: cluster}
        words = tuple(f"{name}={value}" for name, value in env.items() if value)
        found.append(Job(size, f"repeat-{repeat}-{size}", tuple(program), words))
    return found


def job_request(
    directory: Path, job: Job, per_node: int, *, gpus: str, launch: str | None
) -> tuple[str, dict[str, Any]]:
    """Return the template and the options of a job.

    ``per_node`` is the number of ranks per node, and ``gpus`` is ``[TYPE:]N`` of a full node, ""
    for none. Fewer ranks request fewer GPUs, or the smallest world size would be charged for a full
    node. ``launch`` is how ranks are started; None for the template's default.

    Raises ConfigError if the last node would have fewer ranks than the others.
    """
    world_size = job.world_size
    nodes = hosts_of(world_size, per_node)
    values: dict[str, Any] = {
        "nodes": nodes,
        "nproc_per_node": min(world_size, per_node),
        "run_dir": str(directory),
        "launch": launch,
        # A restarted rank would fail again, or measure a machine that was just disturbed.
        "rank_restarts": None if launch == "task-per-gpu" else 0,
        "command": job.command,
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
