"""Check Slurm for a run's jobs, and render a script for the cluster of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict, fine, judged
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_ANSWER_S = 10.0
_NOT_SET_UP = "Could not establish a configuration source"
_GRACE_S = 30
"""Seconds that a worker needs from a warning to its end: 25 for its item, the rest to leave."""


def check_slurm() -> list[Finding]:
    """Query the controller's settings once and judge them; one finding if none answers."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if len(missing) == len(_PROGRAMS):
        return [_skipped("not on this PATH; workers run here without it")]
    if missing:
        return [_unknown(f"{', '.join(missing)} cannot be found", "look at your PATH")]
    began = time.monotonic()
    try:
        config = slurm_config(timeout_s=_ANSWER_S)
    except SlurmError as error:
        if _NOT_SET_UP in error.message:
            return [_skipped("installed, but not set up on this machine (no slurm.conf)")]
        return [_unknown(error.message, error.hint)]
    took_s = time.monotonic() - began
    return [_answer(config, took_s), judge_requeue(config)]


def _answer(config: Mapping[str, str], took_s: float) -> Finding:
    version = config.get("SLURM_VERSION", "of an unknown version")
    found = f"{version} of cluster {config.get('ClusterName', '?')} answered in "
    return fine("slurm", found + format_duration(took_s))


def judge_requeue(config: Mapping[str, str]) -> Finding:
    """Judge what happens to a job that is preempted, or loses a node (slurm.conf(5))."""
    wait_s, mode = _number(config.get("KillWait", "")), config.get("PreemptMode", "OFF").upper()
    told = [f"JobRequeue={config.get('JobRequeue', '?')} (scripts of hpctk ask for it themselves)"]
    told += [f"KillWait={wait_s} s"] if wait_s is not None else []
    told += [f"PreemptMode={mode}"]
    slower: list[tuple[str, str]] = []
    if "CANCEL" in mode:
        means = "a preempted job is not started again; what it held waits for other workers"
        slower.append((means, "submit again when it was preempted, or ask for another QOS"))
    if wait_s is not None and wait_s < _GRACE_S:
        means = f"an item that takes longer than {wait_s} s is begun again after a time limit"
        fix = f"render with --sbatch signal=B:USR1@120, or work with --grace {max(wait_s - 5, 1)}s"
        slower.append((means, fix))
    means = "; ".join(means for means, _ in slower)
    fix = "; ".join(fix for _, fix in slower)
    return judged("requeue", ", ".join(told), Verdict.SLOWER, means, fix, bad=bool(slower))


def _skipped(found: str) -> Finding:
    return Finding("slurm", Verdict.SKIPPED, found)


def _unknown(found: str, fix: str) -> Finding:
    means = "no job can be submitted or watched from here now; local workers need no Slurm"
    return Finding("slurm", Verdict.UNKNOWN, found, means, fix)


def _number(text: str) -> int | None:
    """Return the leading number of a setting such as ``30 sec``, or None."""
    match = re.match(r"[0-9]+", text)
    return int(match[0]) if match else None


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
        script = render_script(spec, cluster, template)
    except HpcToolkitError as error:
        means = "no script can be rendered here without --cluster"
        return Finding(check, Verdict.UNSAFE, error.message, means, error.hint)
    if said := _refused(script):
        found, means = f"bash refuses {template} for {cluster.name}: {said}", "no job can run it"
        return Finding(
            check, Verdict.UNSAFE, found, means, "look at the cluster's [setup] and [env]"
        )
    return fine(check, f"{template} renders for cluster {cluster.name}, and bash reads it")


def _refused(script: str) -> str:
    """Return bash's first complaint about a script; "" if it has none, or without bash."""
    bash = shutil.which("bash")
    if bash is None:
        return ""
    words = [bash, "-n"]
    done = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
    if not done.returncode:
        return ""
    return (done.stderr.strip() or f"bash ends with {done.returncode}").splitlines()[0]
