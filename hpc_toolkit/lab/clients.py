"""Run Slurm's commands against a lab, and against no other Slurm; kill those that take too long."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.lab.packages import program
from hpc_toolkit.system.processes import kill_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hpc_toolkit.lab.settings import LabPaths

ANSWER_S = 30.0
"""Seconds for a query. Slurm's programs retry by themselves for about 10 s."""
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


def finished(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    what: str,
    logs: Path,
    limit_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its exit code and output.

    Errors call it ``what`` and refer to ``logs``, the directory of the daemons' logs. It gets
    ``limit_s`` seconds, by default ANSWER_S.

    Raises:
        HpcToolkitError: the command did not end in time, for example because a daemon is stopped.
            Its process group was killed.
    """
    limit_s = ANSWER_S if limit_s is None else limit_s
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environ,
        process_group=0,
    )
    with child:
        try:
            stdout, stderr = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            message = f"{what} did not answer within {limit_s:.3g} s"
            raise HpcToolkitError(message, hint=f"the lab's logs are in {logs}") from None
        finally:
            if child.poll() is None:
                kill_group(child.pid)
    return subprocess.CompletedProcess(argv, child.returncode, stdout, stderr)
