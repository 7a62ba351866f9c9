"""Check Slurm for a run's jobs, and render every template for the cluster of this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.findings import Finding, Verdict, fine, judged
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.client import SlurmError, ask
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.clusters.probe import parse_config
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.slurm.clusters.facts import Cluster

_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_ANSWER_S = 10.0
_NOT_SET_UP = "Could not establish a configuration source"
_GRACE_S = 30
"""Seconds that a worker needs from a warning to its end: 25 for its item, the rest to leave."""
_OWN: dict[str, dict[str, Any]] = {
    "array": {"array": "0-3"},
    "command": {"command": ("true",)},
    "ray": {"command": ("true",)},
    "train-cpu": {"command": ("train.py",), "gpus_per_node": 0},
    "train-single-gpu": {"command": ("train.py",), "gpus_per_node": 1},
    "train-multi-gpu": {"command": ("train.py",)},
    "train-multi-node": {"command": ("train.py",)},
}
"""Fields that each template needs."""
_ON_GPUS = ("train-single-gpu", "train-multi-gpu")
_ON_ONE_NODE = ("train-cpu", *_ON_GPUS)


def check_slurm() -> list[Finding]:
    """Query the controller's settings once and judge them; one finding if none answers."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if len(missing) == len(_PROGRAMS):
        return [_skipped("not on this PATH; workers run here without it")]
    if missing:
        return [_unknown(f"{', '.join(missing)} cannot be found", "look at your PATH")]
    began = time.monotonic()
    try:
        config = parse_config(ask(["scontrol", "show", "config"], timeout_s=_ANSWER_S))
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


def check_scripts() -> list[Finding]:
    """Render each template for the smallest job that the cluster accepts; submit nothing."""
    try:
        cluster = resolve_cluster(None).cluster
    except HpcToolkitError as error:
        means = "no script can be rendered here without --cluster"
        return [Finding("templates", Verdict.UNSAFE, error.message, means, error.hint)]
    from hpc_toolkit.slurm.render.script import template_names

    names = [name for name in template_names() if _has_place(name, cluster)]
    faults = []
    for name in names:
        if (told := try_template(name, cluster)) is not None:
            found, means = f"{name}, for {cluster.name}: {told[0]}", "no job can be made of it"
            faults.append(Finding("templates", Verdict.UNSAFE, found, means, told[1]))
    found = f"{len(names)} render for cluster {cluster.name}, and bash reads them"
    return faults or [fine("templates", found)]


def _has_place(name: str, cluster: Cluster) -> bool:
    """Return whether a site can run jobs of a template at all."""
    if name in _ON_GPUS and cluster.gpus_per_node == 0:
        return False
    return name not in _ON_ONE_NODE or (cluster.min_nodes or 1) == 1


def try_template(name: str, cluster: Cluster) -> tuple[str, str] | None:
    """Return what is wrong with a template's script, and how to fix it; None if it is fine."""
    from hpc_toolkit.slurm.render.script import render_script
    from hpc_toolkit.slurm.render.spec import ScriptSpec

    try:
        fields: dict[str, Any] = {
            "nodes": cluster.min_nodes or 1,
            "gpus_per_node": cluster.gpus_per_node or int(name in _ON_GPUS),
            "account": "doctor" if cluster.account_required else None,
        }
        fields |= _OWN.get(name, {})
        spec = ScriptSpec(job_name=name, python=os.path.abspath(sys.executable), **fields)
        script = render_script(spec, cluster, name)
    except HpcToolkitError as error:
        return error.message, error.hint
    said = _refused(script)
    return (said, "look at the cluster's [setup] and [env]") if said else None


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
