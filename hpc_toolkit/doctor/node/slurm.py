"""Check Slurm for a run's jobs, and render a script for the cluster of this machine."""

from __future__ import annotations

import os
import shutil
import sys
import time

from hpc_toolkit.doctor.findings import Finding, Verdict, fine
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.system.quantities import format_duration

_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_ANSWER_S = 10.0
_NOT_SET_UP = "Could not establish a configuration source"


def check_slurm() -> Finding:
    """Query the controller once."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if len(missing) == len(_PROGRAMS):
        return _skipped("not on this PATH; workers run here without it")
    if missing:
        return _unknown(f"{', '.join(missing)} cannot be found", "look at your PATH")
    began = time.monotonic()
    try:
        config = slurm_config(timeout_s=_ANSWER_S)
    except SlurmError as error:
        if _NOT_SET_UP in error.message:
            return _skipped("installed, but not set up on this machine (no slurm.conf)")
        return _unknown(error.message, error.hint)
    version = config.get("SLURM_VERSION", "of an unknown version")
    found = f"{version} of cluster {config.get('ClusterName', '?')} answered in "
    return fine("slurm", found + format_duration(time.monotonic() - began))


def _skipped(found: str) -> Finding:
    return Finding("slurm", Verdict.SKIPPED, found)


def _unknown(found: str, fix: str) -> Finding:
    means = "no job can be submitted or watched from here now; local workers need no Slurm"
    return Finding("slurm", Verdict.UNKNOWN, found, means, fix)


def check_script() -> Finding:
    """Render a script for the smallest job that the cluster accepts; submit nothing."""
    from hpc_toolkit.slurm.render.script import render_script
    from hpc_toolkit.slurm.render.spec import ScriptSpec

    check, template = "templates", "work-queue"
    try:
        cluster = resolve_cluster(None).cluster
        spec = ScriptSpec(
            job_name=template,
            python=os.path.abspath(sys.executable),
            nodes=cluster.min_nodes or 1,
            gpus_per_node=cluster.gpus_per_node or 0,
            account="doctor" if cluster.account_required else None,
        )
        render_script(spec, cluster, template)
    except HpcToolkitError as error:
        means = "no script can be rendered here without --cluster"
        return Finding(check, Verdict.UNSAFE, error.message, means, error.hint)
    return fine(check, f"{template} renders for cluster {cluster.name}")
