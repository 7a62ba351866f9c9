"""Check the GPUs of both sides: whether they answer, compute and communicate.

Every query of a driver runs in a child that can be abandoned: a broken driver never answers.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.doctor.children import Child, ask_child
from hpc_toolkit.doctor.findings import Finding, Verdict, fine
from hpc_toolkit.doctor.node import torchprobe
from hpc_toolkit.rundir import files
from hpc_toolkit.system.gpus import CUDA, ask_driver, visible_gpus
from hpc_toolkit.system.quantities import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.doctor.sides import Pair

_DRIVER_S = 25.0
_TORCH_S = 60.0
_RANKS_S = 60.0
_AMD = Path("/dev/kfd")
MEETING = "meeting"
"""Name of the file into which the first rank writes its address."""
_FAILS = "items that use a GPU fail on this node, or wait for ever"
_LEAVE_OUT = "leave the node out (--sbatch exclude=NODE), and tell the site"
_TOGETHER = "srun -N2 --ntasks-per-node=1 --gpus-per-node=1 hpctk doctor DIR"
_CPU = "cpu"


def look_here() -> dict[str, Any]:
    """Check this side's GPUs: ``findings``, as JSON, and ``count``, how many torch can use."""
    finding, torch_wanted = _judge_driver(_asked(ask_driver, _DRIVER_S))
    findings = [finding]
    count = 0
    if torch_wanted:
        if find_spec("torch") is None:
            findings.append(_skipped("torch", "is not installed for this interpreter"))
        else:
            told = _asked(torchprobe.look, _TORCH_S)
            findings.append(judge_torch(told))
            count = len(told.get("gpus", ())) if findings[-1].verdict is Verdict.FINE else 0
    return {"findings": [one.to_json() for one in findings], "count": count}


def check_gpus(pair: Pair, *, nodes: bool) -> list[Finding]:
    """Check the GPUs of both sides, and run an all_reduce of torch over all of them.

    Args:
        pair: the sides.
        nodes: whether the other side is another node, whose GPUs are checked as well.
    """
    if nodes:
        pair.start("gpus")
    here = look_here()
    # An idle other side gets a request too: without one it would give up after ANSWER_S seconds.
    there = pair.finish() if nodes else {"findings": [], "count": 0, "at": pair.ask("wall")}
    findings = _named(here, pair.here.host if nodes else "")
    findings += _named(there, pair.there.host)
    counts = (here["count"], there["count"])
    hosts = [host for host, n in zip((pair.here.host, pair.there.host), counts, strict=True) if n]
    if not hosts:
        return [*findings, _skipped("all_reduce", "no GPU that torch can use")]
    if nodes and 0 in counts:
        return [*findings, _skipped("all_reduce", f"{hosts[0]} alone has GPUs that torch can use")]
    answers = sum_over(pair, counts)
    return [*findings, judge_sum(answers, " and ".join(hosts), alone=not nodes)]


def sum_over(pair: Pair, counts: tuple[int, int], *, device: str = "cuda") -> list[dict[str, Any]]:
    """Run an all_reduce with one rank per GPU of both sides; return answers, the lead's first."""
    meeting = pair.area / MEETING
    # Created before a rank looks for it: clients may cache a missing name for a minute.
    os.close(files.open_or_create(meeting, os.O_WRONLY))
    world = sum(counts)
    address = os.uname().nodename if counts[1] else "127.0.0.1"

    def ranks(first: int, count: int) -> dict[str, Any]:
        told = {"first": first, "count": count, "world": world}
        return {**told, "device": device, "address": address}

    if counts[1]:
        pair.start("sum", **ranks(counts[0], counts[1]))
    answers = run_ranks(meeting, **ranks(0, counts[0]))
    return answers + (pair.finish() if counts[1] else [])


def run_ranks(
    meeting: Path, *, first: int, count: int, world: int, device: str, address: str
) -> list[dict[str, Any]]:
    """Run ``count`` ranks from ``first`` on, each in a child, and return their answers."""

    def be(rank: int) -> Child:
        name = device if device == _CPU else f"{device}:{rank - first}"
        return Child(
            lambda: torchprobe.sum_together(
                meeting,
                rank=rank,
                world=world,
                device=name,
                address=address,
                timeout_s=_RANKS_S - 5,
            )
        )

    end = time.monotonic() + _RANKS_S
    children: list[Child] = []
    try:
        children += [be(first + index) for index in range(count)]
        return [
            _answer(partial(child.answer, max(0.0, end - time.monotonic())), _RANKS_S)
            for child in children
        ]
    finally:
        for child in children:
            child.end()


def _asked(call: Any, timeout_s: float) -> Any:
    """Make a call that may hang or die; return its result, or a mapping with ``error``."""
    return _answer(partial(ask_child, call, timeout_s), timeout_s)


def _answer(wait: Callable[[], Any], limit_s: float) -> Any:
    """Wait for a child's result; return it, or a mapping with ``error``."""
    try:
        return wait()
    except TimeoutError:
        return {"error": f"no answer within {limit_s:g} s"}
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
    broken = {index: gpu["error"] for index, gpu in enumerate(gpus) if "error" in gpu}
    if broken:
        words = ", ".join(f"GPU {index}: {error}" for index, error in broken.items())
        return _fault("gpus", f"{len(broken)} of {len(gpus)} fail: {words}", _LEAVE_OUT), True
    newest = f"{told['cuda'] // 1000}.{told['cuda'] % 1000 // 10}"
    found = f"{listed(gpus)}; driver {told['driver']}, for CUDA up to {newest}"
    return fine("gpus", found), True


def _without_driver() -> tuple[Finding, bool]:
    if _AMD.exists():
        return _skipped("gpus", "no NVIDIA driver; AMD's is asked by torch alone"), True
    granted = visible_gpus()
    if granted:
        found = f"{len(granted)} are granted ({CUDA}), but no driver is here"
        return _fault("gpus", found, "look at 'nvidia-smi' on this node"), False
    return _skipped("gpus", "no driver on this node"), False


def listed(gpus: list[dict[str, Any]]) -> str:
    """List GPUs by kind, with memory and the least free memory: "4 x NVIDIA L40S, 44 GiB"."""
    kinds = Counter((gpu["name"], gpu["total"]) for gpu in gpus)
    words = ", ".join(f"{n} x {name}, {format_size(total)}" for (name, total), n in kinds.items())
    return f"{words} ({format_size(min(gpu['free'] for gpu in gpus))} free)"


def judge_torch(told: dict[str, Any]) -> Finding:
    """Judge the answer of :func:`hpc_toolkit.doctor.node.torchprobe.look`."""
    check = "torch"
    if "torch" not in told:
        found = f"looking at GPUs with torch failed: {told['error']}"
        means = "its import, or a GPU, hangs or crashes; work that uses torch would as well"
        fix = "try: python -c 'import torch; torch.zeros(1).cuda()'"
        return Finding(check, Verdict.UNKNOWN, found, means, fix)
    version = f"torch {told['torch']}"
    if not told["cuda"]:
        means = "what uses torch runs on the CPUs, beside idle GPUs"
        fix = "install a build for CUDA (https://pytorch.org/get-started/locally)"
        return Finding(check, Verdict.SLOWER, f"{version} is built without CUDA", means, fix)
    if "error" in told:
        fix = "install a build for the driver's CUDA, or have the driver renewed"
        return _fault(check, f"{version} for CUDA {told['cuda']}: {told['error']}", fix)
    gpus: list[dict[str, Any]] = told["gpus"]
    if not gpus:
        return _fault(check, f"{version} finds no GPU", "look at CUDA_VISIBLE_DEVICES")
    broken = [
        f"GPU {index}: {gpu.get('error', 'a product is wrong')}"
        for index, gpu in enumerate(gpus)
        if not gpu.get("right")
    ]
    if broken:
        found = f"{len(broken)} of {len(gpus)} fail: {', '.join(broken)}"
        return _fault(check, found, _LEAVE_OUT)
    slowest = max(gpu["seconds"] for gpu in gpus)
    found = f"{version} for CUDA {told['cuda']} multiplies on {listed(gpus)}"
    return fine(check, f"{found}, at first in {format_duration(slowest)}")


def judge_sum(answers: list[dict[str, Any]], hosts: str, *, alone: bool) -> Finding:
    """Judge the answers of the ranks of an all_reduce on ``hosts``."""
    check = "all_reduce"
    broken = [
        f"rank {rank}: {answer.get('error', 'the sum is wrong')}"
        for rank, answer in enumerate(answers)
        if not answer.get("right")
    ]
    if broken:
        found = f"{len(broken)} of {len(answers)} ranks on {hosts} fail: {broken[0]}"
        means = "ranks that train together fail or hang; items that need one GPU do not"
        fix = "NCCL_DEBUG=INFO shows why; a site's network may need NCCL_SOCKET_IFNAME"
        return Finding(check, Verdict.UNSAFE, found, means, fix)
    size = format_size(4 * torchprobe.NUMBERS)
    slowest = max(answer["seconds"] for answer in answers)
    ranks = f"{len(answers)} ranks on {hosts}" if len(answers) > 1 else f"one rank on {hosts}"
    found = f"{answers[0]['library']}: {ranks} summed {size} in {slowest * 1000:.3g} ms"
    if alone:
        found += f"; between nodes: {_TOGETHER}"
    return fine(check, found)


def _named(told: dict[str, Any], host: str) -> list[Finding]:
    found = []
    for record in told["findings"]:
        verdict = Verdict(record["verdict"])
        check = f"{record['check']} ({host})" if host else record["check"]
        found.append(Finding(**{**record, "verdict": verdict, "check": check}))
    return found


def _fault(check: str, found: str, fix: str) -> Finding:
    return Finding(check, Verdict.UNSAFE, found, _FAILS, fix)


def _skipped(check: str, why: str) -> Finding:
    return Finding(check, Verdict.SKIPPED, why)
