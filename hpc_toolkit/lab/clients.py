"""Run Slurm's commands against a lab, and against no other Slurm; kill those that take too long."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.packages import program
from hpc_toolkit.slurm.client import SlurmSilentError
from hpc_toolkit.slurm.client import run as run_program

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.lab.settings import LabPaths
    from hpc_toolkit.slurm.client import Finished

ANSWER_S = 30.0
"""Seconds for a query. Slurm's programs retry by themselves for about 10 s."""
# Variables of an outer Slurm, or options meant for it, would change commands for the lab.
_FOREIGN = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_",
    "SCONTROL_", "PMI_", "PMIX_",
)  # fmt: skip


def environment(paths: LabPaths) -> dict[str, str]:
    own = {key: text for key, text in os.environ.items() if not key.startswith(_FOREIGN)}
    return {**own, "SLURM_CONF": str(paths.slurm_conf)}


def finished(
    paths: LabPaths,
    *argv: str,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Finished:
    """Run a command to its end, by default a Slurm command against the lab.

    Kills its process group after ``limit_s``, by default 30 s, e.g. because a daemon is stopped.
    """
    given = environment(paths) if environ is None else environ
    words = [program(argv[0]), *argv[1:]]
    try:
        return run_program(words, timeout_s=limit_s or ANSWER_S, environ=given)
    except SlurmSilentError as error:
        message = error.message.replace(words[0], argv[0])
        raise HpcToolkitError(message, hint=f"the lab's logs are in {paths.logs}") from None


def ask(paths: LabPaths, *argv: str, limit_s: float | None = None) -> str:
    """Run a Slurm command against the lab and return its stdout."""
    done = finished(paths, *argv, limit_s=limit_s)
    if done.code != 0:
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
