"""Render every template for the cluster of this machine, and let bash check the scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.slurm.clusters.choice import resolve_cluster

if TYPE_CHECKING:
    from hpc_toolkit.slurm.clusters.facts import Cluster

_SHELL_S = 60.0
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


def check_scripts() -> list[Finding]:
    """Render each template for the smallest job that the cluster accepts; submit nothing."""
    check = "templates"
    try:
        cluster = resolve_cluster(None).cluster
    except HpcToolkitError as error:
        means = "no script can be rendered here without --cluster"
        return [_fault(check, error.message, means, error.hint)]
    from hpc_toolkit.slurm.render.script import template_names

    names = [name for name in template_names() if _has_place(name, cluster)]
    faults = [
        _fault(check, f"{name}, for {cluster.name}: {why}", "no job can be made of it", fix)
        for name in names
        if (told := try_template(name, cluster)) is not None
        for why, fix in [told]
    ]
    found = f"{len(names)} render for cluster {cluster.name}, and bash reads them"
    return faults or [Finding(check=check, verdict=Verdict.FINE, found=found)]


def _has_place(name: str, cluster: Cluster) -> bool:
    """Return whether a site can run jobs of a template at all."""
    if name in _ON_GPUS and cluster.gpus_per_node == 0:
        return False
    return name not in _ON_ONE_NODE or (cluster.min_nodes or 1) == 1


def try_template(name: str, cluster: Cluster) -> tuple[str, str] | None:
    """Return what is wrong with a template's script, and how to fix it; None if it is fine."""
    from hpc_toolkit.slurm.render.file import origin
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
    if origin(script) != "rendered":
        return "its hash does not check out", "install hpc-toolkit again"
    said = _refused(script)
    return (said, "look at the cluster's [setup] and [env]") if said else None


def _refused(script: str) -> str:
    """Return bash's first complaint about a script; "" if it has none, or without bash."""
    bash = shutil.which("bash")
    if bash is None:
        return ""
    try:
        done = subprocess.run(
            [bash, "-n"],
            input=script,
            capture_output=True,
            text=True,
            timeout=_SHELL_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bash does not read it: {error}"
    if not done.returncode:
        return ""
    return (done.stderr.strip() or f"bash ends with {done.returncode}").splitlines()[0]


def _fault(check: str, found: str, means: str, fix: str) -> Finding:
    return Finding(check=check, verdict=Verdict.UNSAFE, found=found, means=means, fix=fix)
