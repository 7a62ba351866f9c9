"""The Slurm jobs of a scaling run: what each of them requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.submit.jobs import JobStates, read_jobs
from hpc_toolkit.training.scaling.launches import MODULE, hosts_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hpc_toolkit.training.scaling.launches import ScalingRun


def job_request(
    run: ScalingRun, world_size: int, per_node: int, *, gpus: str, launch: str | None
) -> tuple[str, dict[str, Any]]:
    """Return the template and the options of the job that measures one world size.

    ``per_node`` is the number of ranks per node, and ``gpus`` is ``[TYPE:]N`` of a full node, ""
    for none. Fewer ranks request fewer GPUs, or the smallest world size would be charged for a full
    node. ``launch`` is how ranks are started; None for the template's default.

    Raises ConfigError if the last node would have fewer ranks than the others.
    """
    nodes = hosts_of(world_size, per_node)
    values: dict[str, Any] = {
        "nodes": nodes,
        "nproc_per_node": min(world_size, per_node),
        "run_dir": str(run.directory),
        "launch": launch,
        # A restarted rank would fail again, or measure a machine that was just disturbed.
        "rank_restarts": None if launch == "task-per-gpu" else 0,
        "command": ("-m", MODULE, *run.words()),
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
