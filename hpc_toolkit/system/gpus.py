"""The GPUs that a process may use, and what NVIDIA's driver reports about them.

The environment variables of CUDA, ROCm and Slurm name the GPUs. The driver's library NVML is called
by ctypes, which needs no package.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.system.ranks import other_job, task_counts

CUDA = "CUDA_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"

_NVML = "libnvidia-ml.so.1"
_NAME_BYTES = 96
"""Bytes of the longest name that the library returns (NVML_DEVICE_NAME_V2_BUFFER_SIZE)."""


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
    """Environment changes that give a queue worker started by srun or MPI GPUs of its own.

    ``--gpus-per-node`` shows every rank all GPUs of its node, so code that takes the first GPU
    would put all ranks on it. Nothing changes for a rank that is alone on its node or sees one
    GPU. Do not use this for ranks of one training, which must see each other's GPUs.
    """
    ranks, rank = ranks_here(environ), rank_here(environ)
    for name in (CUDA, ROCR):
        gpus = [gpu for gpu in environ.get(name, "").split(",") if gpu]
        if gpus:
            # A rank that sees fewer GPUs than the node has got its own from Slurm.
            all_of_them = len(gpus) >= int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)
            mine = ranks > 1 and len(gpus) > 1 and rank.isdigit() and all_of_them
            return {name: ",".join(share_of_gpus(gpus, int(rank), ranks))} if mine else {}
    return {}


def ranks_here(environ: Mapping[str, str]) -> int:
    """Number of ranks of this step on this node, from srun's or MPI's variables; 1 if unknown."""
    other = other_job(environ)
    if other is not None and other.rank is not None:
        size = environ.get(other.rank.local_size, "")
        return max(1, int(size)) if size.isdigit() else 1
    counts = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 1


def rank_here(environ: Mapping[str, str]) -> str:
    """Number of this rank on its node, from 0; "" if unknown."""
    other = other_job(environ)
    names = None if other is None else other.rank
    return environ.get("SLURM_LOCALID" if names is None else names.local_rank, "")


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def ask_driver(library: str = _NVML) -> dict[str, Any] | None:
    """Query the driver; None if there is no driver. May never return.

    Returns only ``error`` if the driver does not work. Otherwise ``driver``, its version; ``cuda``,
    the newest CUDA that it runs, as 1000 * major + 10 * minor; and ``gpus``, each with ``name``,
    ``total`` and ``free`` bytes, or with ``error``. All values can be encoded as JSON.
    """
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    code = nvml.nvmlInit_v2()
    if code:
        return {"error": _reason(nvml, code)}
    version, cuda = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_int(0)
    nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_NAME_BYTES))
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    gpus = [_ask_gpu(nvml, index) for index in range(count.value)]
    nvml.nvmlShutdown()
    return {"driver": version.value.decode(), "cuda": cuda.value, "gpus": gpus}


def _ask_gpu(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    """Query one GPU. A GPU that fell off the bus is listed, but a query of its memory fails."""
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
    memory = _Memory()
    code = (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
        or nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES))
        or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    )
    if code:
        return {"error": _reason(nvml, code)}
    return {"name": name.value.decode(), "total": memory.total, "free": memory.free}


def _reason(nvml: ctypes.CDLL, code: int) -> str:
    words: bytes | None = nvml.nvmlErrorString(code)
    return words.decode() if words else f"error {code}"
