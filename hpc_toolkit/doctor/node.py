"""Check a node: whether its GPUs compute, and Slurm answers.

Every query of a driver runs in a child that can be abandoned: a broken driver never answers.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_toolkit.doctor.sides import Finding, Pair, Verdict, ask_child, fine
from hpc_toolkit.slurm.client import NOT_SET_UP, SlurmError
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.system.gpus import CUDA, ask_driver, visible_gpus
from hpc_toolkit.system.quantities import counted, format_duration, format_size

_DRIVER_S = 25.0
_TORCH_S = 60.0
_AMD = Path("/dev/kfd")
_MOST_WORDS = 160
_FAILS = "items that use a GPU fail on this node, or wait for ever"
_LEAVE_OUT = "leave the node out (--sbatch exclude=NODE), and tell the site"
_PROGRAMS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_ANSWER_S = 10.0


def look_at_gpus() -> list[dict[str, Any]]:
    finding, torch_wanted = _judge_driver(_asked(ask_driver, _DRIVER_S))
    findings = [finding]
    if torch_wanted and find_spec("torch") is None:
        findings.append(_skipped("torch", "is not installed for this interpreter"))
    elif torch_wanted:
        findings.append(judge_torch(_asked(look_by_torch, _TORCH_S)))
    return [asdict(one) for one in findings]


def check_devices(pair: Pair, *, nodes: bool) -> list[Finding]:
    """Check GPUs of this side, and with ``nodes`` those of the other side's node."""
    if not nodes:
        return _decoded(look_at_gpus(), "")
    pair.start("devices")
    here = look_at_gpus()
    return _decoded(here, pair.here.host) + _decoded(pair.finish(), pair.there.host)


def _asked(call: Callable[[], Any], timeout_s: float) -> Any:
    """Make a call that may hang or die; return its result, or a mapping with ``error``."""
    try:
        return ask_child(call, timeout_s)
    except TimeoutError:
        return {"error": f"no answer within {timeout_s:g} s"}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _judge_driver(told: dict[str, Any] | None) -> tuple[Finding, bool]:
    """Return the finding on the driver, and whether to check torch as well."""
    if told is None:
        return _without_driver()
    if "error" in told:
        return _fault("gpus", f"the driver does not work: {told['error']}", _LEAVE_OUT), False
    gpus: list[dict[str, Any]] = told["gpus"]
    if not gpus or (CUDA in os.environ and not visible_gpus()):
        return _skipped("gpus", "none that this process may use"), False
    broken = [f"GPU {index}: {gpu['error']}" for index, gpu in enumerate(gpus) if "error" in gpu]
    if broken:
        found = f"{len(broken)} of {len(gpus)} fail: {', '.join(broken)}"
        return _fault("gpus", found, _LEAVE_OUT), True
    kinds = Counter((gpu["name"], gpu["total"]) for gpu in gpus)
    words = ", ".join(f"{n} x {name}, {format_size(total)}" for (name, total), n in kinds.items())
    free = format_size(min(gpu["free"] for gpu in gpus))
    newest = f"{told['cuda'] // 1000}.{told['cuda'] % 1000 // 10}"
    return fine(
        "gpus", f"{words} ({free} free); driver {told['driver']}, for CUDA up to {newest}"
    ), True


def _without_driver() -> tuple[Finding, bool]:
    if _AMD.exists():
        return _skipped("gpus", "no NVIDIA driver; AMD's is asked by torch alone"), True
    if granted := visible_gpus():
        found = f"{len(granted)} are granted ({CUDA}), but no driver is here"
        return _fault("gpus", found, "look at 'nvidia-smi' on this node"), False
    return _skipped("gpus", "no driver on this node"), False


def judge_torch(told: dict[str, Any]) -> Finding:
    check = "torch"
    if "torch" not in told:
        found = f"looking at GPUs with torch failed: {told['error']}"
        means = "importing torch, or a GPU, hangs or crashes; work that uses torch would too"
        fix = "try: python -c 'import torch; torch.zeros(1).cuda()'"
        return Finding(check, Verdict.UNKNOWN, found, means, fix)
    version = f"torch {told['torch']}"
    if not told["cuda"]:
        means = "torch runs on CPUs while the GPUs are idle"
        fix = "install a build for CUDA (https://pytorch.org/get-started/locally)"
        return Finding(check, Verdict.SLOWER, f"{version} is built without CUDA", means, fix)
    if "error" in told:
        fix = "install a build for the driver's CUDA, or have the driver renewed"
        return _fault(check, f"{version} for CUDA {told['cuda']}: {told['error']}", fix)
    gpus: list[str] = told["gpus"]
    if not gpus:
        return _fault(check, f"{version} finds no GPU", "look at CUDA_VISIBLE_DEVICES")
    if broken := [f"GPU {index}: {error}" for index, error in enumerate(gpus) if error]:
        found = f"{len(broken)} of {len(gpus)} fail: {', '.join(broken)}"
        return _fault(check, found, _LEAVE_OUT)
    return fine(check, f"{version} for CUDA {told['cuda']} computes on {counted(len(gpus), 'GPU')}")


def _decoded(records: list[dict[str, Any]], host: str) -> list[Finding]:
    found = []
    for record in records:
        check = f"{record['check']} ({host})" if host else record["check"]
        found.append(Finding(**{**record, "verdict": Verdict(record["verdict"]), "check": check}))
    return found


def _fault(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.UNSAFE, found, _FAILS, fix)


def _skipped(check: str, why: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, why)


def look_by_torch() -> dict[str, Any]:
    """Return torch's version and whether it can use each GPU; called in a child process.

    ``cuda`` is "" for a build without GPUs. In a build with GPUs, ``error`` says why torch cannot
    use them; otherwise ``gpus`` has an error or "" for each.
    """
    _be_quiet()
    import torch

    told = {"torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip or ""}
    if not told["cuda"]:
        return told
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return {**told, "error": _first_words(error)}
    gpus = []
    for index in range(torch.cuda.device_count()):
        try:
            torch.ones(1, device=torch.device("cuda", index)).sum().item()
            gpus.append("")
        except RuntimeError as error:
            gpus.append(_first_words(error))
    return {**told, "gpus": gpus}


def _be_quiet() -> None:
    """Drop the output of libraries: stdout carries the report."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(nothing, fd)


def _first_words(error: BaseException) -> str:
    """Return the first line of an error that is not empty, short enough for a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:_MOST_WORDS]


def check_slurm() -> Finding:
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if len(missing) == len(_PROGRAMS):
        return _skipped("slurm", "not on this PATH; workers run here without it")
    if missing:
        return _silent_slurm(f"{', '.join(missing)} cannot be found", "look at your PATH")
    began = time.monotonic()
    try:
        config = slurm_config(timeout_s=_ANSWER_S)
    except SlurmError as error:
        if NOT_SET_UP in error.message:
            return _skipped("slurm", f"installed, but {NOT_SET_UP}")
        return _silent_slurm(error.message, error.hint)
    version = config.get("SLURM_VERSION", "of an unknown version")
    took = format_duration(time.monotonic() - began)
    cluster = config.get("ClusterName", "?")
    return fine("slurm", f"{version} of cluster {cluster} answered in {took}")


def _silent_slurm(found: str, fix: str) -> Finding:
    means = "jobs cannot be submitted or watched from here now; local workers do not need Slurm"
    return Finding("slurm", Verdict.UNKNOWN, found, means, fix)
