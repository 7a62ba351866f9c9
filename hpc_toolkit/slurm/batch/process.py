"""The batch process of a job, from its first line of log to its exit code."""

from __future__ import annotations

import shlex
import subprocess
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.batch.job import this_job
from hpc_toolkit.slurm.batch.requeue import Restarts
from hpc_toolkit.slurm.batch.step import Batch, JobEnd, Signals, as_command

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def run_batch(
    script: Path,
    body: Callable[[Batch, Restarts], object],
    *,
    array_offset: int = 0,
    max_restarts: int = 10,
    forward: bool = True,
    node_setup: Sequence[str] = (),
    teardown: Sequence[str] = (),
) -> int:
    """Do what a job does around its step; the exit code of the job.

    Args:
        script: the running script.
        body: the work; it ends by raising JobEnd.
        array_offset: added to an array's index in HPCTK_ARRAY_INDEX.
        max_restarts: how often the job may start again.
        forward: whether the ranks are sent the warning of the time limit.
        node_setup: commands of plain words that run once on each node.
        teardown: commands of plain words that run at the end, however the job ends.

    Raises:
        JobError: this is not a Slurm job, or it cannot run here.
        SlurmError: Slurm did not answer.
    """
    signals = Signals()
    commands = [shlex.split(line) for line in teardown]
    try:
        job = this_job(script, array_offset=array_offset)
    except BaseException:
        for command in commands:
            subprocess.run(as_command(command), check=False)
        raise
    batch = Batch(job, signals, forward=forward, teardown=commands)
    restarts = Restarts(batch, most=max_restarts)
    try:
        _set_up_nodes(batch, restarts, node_setup)
        body(batch, restarts)
    except JobEnd as end:
        return end.code
    finally:
        batch.clean_up()
    return 0


def _set_up_nodes(batch: Batch, restarts: Restarts, lines: Sequence[str]) -> None:
    if not lines:
        return
    commands = " && ".join(shlex.join(shlex.split(line)) for line in lines)
    text = f'{commands} || {{ echo "failed on $SLURMD_NODENAME" >&2; exit 1; }}'
    code = batch.call([*batch.once_per_node("--label"), "bash", "-c", text])
    if code:
        restarts.checks_failed(code, "the setup of a node failed")
