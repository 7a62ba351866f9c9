"""Check Slurm for a run's jobs: whether it answers, and how its settings affect them."""

from __future__ import annotations

import re
import shutil
import time
from typing import TYPE_CHECKING

from hpc_toolkit.doctor.findings import Finding, Verdict
from hpc_toolkit.slurm.client import SlurmError, ask
from hpc_toolkit.slurm.clusters.probe import parse_config
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
        config = parse_config(ask(["scontrol", "show", "config"], timeout_s=_ANSWER_S))
    except SlurmError as error:
        if _NOT_SET_UP in error.message:
            return [_skipped("installed, but not set up on this machine (no slurm.conf)")]
        return [_unknown(error.message, error.hint)]
    took_s = time.monotonic() - began
    return [_answer(config, took_s), judge_requeue(config), *judge_arrays(config)]


def _answer(config: Mapping[str, str], took_s: float) -> Finding:
    version = config.get("SLURM_VERSION", "of an unknown version")
    found = f"{version} of cluster {config.get('ClusterName', '?')} answered in "
    return Finding(check="slurm", verdict=Verdict.FINE, found=f"{found}{format_duration(took_s)}")


def judge_requeue(config: Mapping[str, str]) -> Finding:
    """Judge what happens to a job that is preempted, or loses a node (slurm.conf(5))."""
    check = "requeue"
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
    return Finding(
        check=check,
        verdict=Verdict.SLOWER if slower else Verdict.FINE,
        found=", ".join(told),
        means="; ".join(means for means, _ in slower),
        fix="; ".join(fix for _, fix in slower),
    )


def judge_arrays(config: Mapping[str, str]) -> list[Finding]:
    """Judge how long a job array can be; [] if Slurm does not say."""
    limit = _number(config.get("MaxArraySize", ""))
    if limit is None:
        return []
    none = limit < 2
    found = "none: MaxArraySize is too small" if none else f"indices up to {limit - 1:,}"
    return [
        Finding(
            check="arrays",
            verdict=Verdict.SLOWER if none else Verdict.FINE,
            found=found if none else f"{found}; 'hpctk submit' cuts longer lists",
            means="the template 'array' cannot be submitted here" if none else "",
            fix="use the template 'work-queue'" if none else "",
        )
    ]


def _skipped(found: str) -> Finding:
    return Finding(check="slurm", verdict=Verdict.SKIPPED, found=found)


def _unknown(found: str, fix: str) -> Finding:
    means = "no job can be submitted or watched from here now; local workers need no Slurm"
    return Finding(check="slurm", verdict=Verdict.UNKNOWN, found=found, means=means, fix=fix)


def _number(text: str) -> int | None:
    """Return the leading number of a setting such as ``30 sec``, or None."""
    match = re.match(r"[0-9]+", text)
    return int(match[0]) if match else None
