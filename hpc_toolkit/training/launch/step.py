"""The variables by which srun describes a step to each of its tasks."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Position of this task in its step."""

    job: str
    """The job ID (SLURM_JOB_ID), which differs for each element of an array."""
    restart: int
    """How often Slurm restarted this job (SLURM_RESTART_COUNT)."""
    step: str
    """The step's number in its job."""
    task: int
    """The number of this task in the step, from 0 (SLURM_PROCID)."""
    node: int
    """The number of this node in the step, from 0 (SLURM_NODEID)."""
    local: int
    """The number of this task on its node, from 0 (SLURM_LOCALID)."""
    tasks: tuple[int, ...]
    """Number of tasks on each node of the step, in the order of the nodes."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Step | None:
        """Read srun's variables; return None outside a step, such as in a batch script.

        Raises:
            ConfigError: a variable is missing, or contradicts another.
        """
        if not environ.get("SLURM_STEP_ID", "").isdigit():
            return None
        tasks = tuple(_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", "")))
        task, node, local = (
            _number(environ, f"SLURM_{name}") for name in ("PROCID", "NODEID", "LOCALID")
        )
        if node >= len(tasks) or local >= tasks[node] or task >= sum(tasks):
            message = (
                f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE', '')!r} has "
                f"no task {task} that is number {local} of node {node}"
            )
            raise ConfigError(message, hint="start hpctk launch with srun, once per task")
        return cls(
            job=environ.get("SLURM_JOB_ID", "0"),
            restart=_number({"SLURM_RESTART_COUNT": "0", **environ}, "SLURM_RESTART_COUNT"),
            step=environ["SLURM_STEP_ID"],
            task=task,
            node=node,
            local=local,
            tasks=tasks,
        )

    @property
    def name(self) -> str:
        """Name that differs from every other step and every other start of this job."""
        return f"{self.job}.{self.restart}.{self.step}"

    @property
    def per_node(self) -> bool:
        """Whether every node has one task, which then starts the node's ranks."""
        return max(self.tasks) == 1


def _counts(text: str) -> list[int]:
    """Parse numbers of tasks in Slurm's notation, such as ``2(x3),1``."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        message = f"{name}={text!r} in a step of Slurm is no number"
        raise ConfigError(message, hint="start hpctk launch with srun, once per task")
    return int(text)
