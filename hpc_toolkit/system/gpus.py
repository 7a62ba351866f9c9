"""The GPUs that a process may use, from the environment variables of CUDA, ROCm and Slurm."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CUDA = "CUDA_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get(CUDA)
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    with suppress(OSError):
        count = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
        return [str(index) for index in range(count)]
    return []


def share_of_gpus(gpus: list[str], rank: int, ranks: int) -> list[str]:
    """The GPUs of rank number ``rank``, one of ``ranks`` ranks of a node that has ``gpus``.

    Each rank gets an equal number in order, and a remainder stays unused. If there are more ranks
    than GPUs, each rank gets one GPU and ranks share them in turn.
    """
    each = len(gpus) // ranks
    return gpus[rank * each : (rank + 1) * each] if each else gpus[rank % len(gpus) :][:1]


def rank_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment changes that give a queue worker started by srun GPUs of its own.

    ``--gpus-per-node`` shows every rank all GPUs of its node, so code that takes the first GPU
    would put all ranks on it. Nothing changes for a rank that is alone on its node or sees one
    GPU. Do not use this for ranks of one training, which must see each other's GPUs.
    """
    ranks = _ranks_here(environ)
    rank = environ.get("SLURM_LOCALID", "")
    for name in (CUDA, ROCR):
        gpus = [gpu for gpu in environ.get(name, "").split(",") if gpu]
        if gpus:
            # A rank that sees fewer GPUs than the node has got its own from Slurm.
            all_of_them = len(gpus) >= int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)
            mine = ranks > 1 and len(gpus) > 1 and rank.isdigit() and all_of_them
            return {name: ",".join(share_of_gpus(gpus, int(rank), ranks))} if mine else {}
    return {}


def _ranks_here(environ: Mapping[str, str]) -> int:
    """Number of ranks of this step on this node, from ``4(x8),2``; 1 if unknown."""
    counts: list[int] = []
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 1
