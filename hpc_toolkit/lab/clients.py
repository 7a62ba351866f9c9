"""Run Slurm's commands against a lab, and against no other Slurm."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.commands import finished
from hpc_toolkit.lab.packages import program

if TYPE_CHECKING:
    from hpc_toolkit.lab.settings import LabPaths

# Variables of an outer Slurm, or options meant for it, would change commands for the lab.
_FOREIGN = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_",
    "SCONTROL_", "PMI_", "PMIX_",
)  # fmt: skip


def environment(paths: LabPaths) -> dict[str, str]:
    """Return this process's environment for commands that contact the lab."""
    own = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
    return {**own, "SLURM_CONF": str(paths.slurm_conf)}


def ask(paths: LabPaths, *argv: str, limit_s: float | None = None) -> str:
    """Run a Slurm command against the lab and return its stdout.

    Raises:
        HpcToolkitError: it fails, or does not answer within ``limit_s``, by default 30 s.
    """
    words = [program(argv[0]), *argv[1:]]
    done = finished(words, environment(paths), what=argv[0], logs=paths.logs, limit_s=limit_s)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"{argv[0]} failed"
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}")
    return done.stdout


def node_states(paths: LabPaths) -> dict[str, str]:
    """Return the state of every node in sinfo's terms; {} while slurmctld does not answer."""
    try:
        text = ask(paths, "sinfo", "-h", "-N", "-p", "main", "-o", "%N %T")
    except HpcToolkitError:
        return {}
    return dict(line.split() for line in text.splitlines())
