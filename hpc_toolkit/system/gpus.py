"""The GPUs that a process may use, and what NVIDIA's driver reports about them.

The environment variables of CUDA, ROCm and Slurm name the GPUs. The driver's library NVML is called
by ctypes, which needs no package, for a check, and by pynvml for samples.
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
_NVLINK = {
    "nvlink_sent_bytes": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
    "nvlink_received_bytes": "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
}
"""Counters of payload in KiB, despite their names; protocol overhead is not included."""
_ALL_LINKS = 2**32 - 1
"""The scope of a counter that makes NVML add up all links of a GPU."""


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
    ranks, rank = ranks_here(environ), environ.get("SLURM_LOCALID", "")
    other = other_job(environ)
    if other is not None and other.rank is not None:
        size = environ.get(other.rank.local_size, "")
        ranks = int(size) if size.isdigit() else 1
        rank = environ.get(other.rank.local_rank, "")
    for name in (CUDA, ROCR):
        gpus = [gpu for gpu in environ.get(name, "").split(",") if gpu]
        if gpus:
            # A rank that sees fewer GPUs than the node has got its own from Slurm.
            all_of_them = len(gpus) >= int(environ.get("SLURM_GPUS_ON_NODE", "0") or 0)
            mine = ranks > 1 and len(gpus) > 1 and rank.isdigit() and all_of_them
            return {name: ",".join(share_of_gpus(gpus, int(rank), ranks))} if mine else {}
    return {}


def ranks_here(environ: Mapping[str, str]) -> int:
    """Number of ranks of this step on this node, from srun's variables; 1 if unknown."""
    counts = task_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 1


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


class GpuReader:
    """Reads all GPUs that the driver shows this process, even those that CUDA may not use."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self.absent = ""
        """Why NVML cannot be used; "" if it can."""
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except nvml.NVMLError as error:
            self.absent = str(error)
        self._links = [self._nvlink(handle) for handle in self._handles]
        """NVLink counters at the start, which count from a time before it."""

    def facts(self) -> list[dict[str, Any]]:
        """Return each GPU's constants: index, name, UUID, memory in bytes, power limit in watts."""
        return [
            {
                "index": index,
                "name": _text(self._ask("nvmlDeviceGetName", handle)),
                "uuid": _text(self._ask("nvmlDeviceGetUUID", handle)),
                "memory_bytes": self._memory(handle, "total"),
                "power_limit_w": _watts(self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)),
            }
            for index, handle in enumerate(self._handles)
        ]

    def read(self) -> list[dict[str, Any]]:
        """Return the current state of each GPU; None for a value that it does not report.

        ``busy_percent`` is the share of the driver's last sample period in which some kernel ran.
        It does not show how much of the GPU that kernel used. ``nvlink_sent_bytes`` and
        ``nvlink_received_bytes`` are the payload over all links since this reader was made.
        """
        return [self._read(index, handle) for index, handle in enumerate(self._handles)]

    def _read(self, index: int, handle: Any) -> dict[str, Any]:
        rates = self._ask("nvmlDeviceGetUtilizationRates", handle)
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        return {
            "index": index,
            "busy_percent": getattr(rates, "gpu", None),
            "memory_busy_percent": getattr(rates, "memory", None),
            "memory_used_bytes": self._memory(handle, "used"),
            "power_w": _watts(self._ask("nvmlDeviceGetPowerUsage", handle)),
            "temperature_c": self._ask("nvmlDeviceGetTemperature", handle, sensor),
            **self._linked(index, handle),
        }

    def _linked(self, index: int, handle: Any) -> dict[str, int | None]:
        """Return the growth of the NVLink counters; None without NVLink, or after their reset."""
        now, first = self._nvlink(handle), self._links[index]
        grown = {name: now[name] - first[name] for name in now.keys() & first.keys()}
        return {name: grown[name] if grown.get(name, -1) >= 0 else None for name in _NVLINK}

    def _nvlink(self, handle: Any) -> dict[str, int]:
        wanted = [(getattr(self._nvml, field), _ALL_LINKS) for field in _NVLINK.values()]
        values = self._ask("nvmlDeviceGetFieldValues", handle, wanted) or ()
        # Each value has its own return code: a GPU without NVLink reports "not supported" there.
        return {
            name: int(one.value.ullVal) * 1024
            for name, one in zip(_NVLINK, values, strict=False)
            if one.nvmlReturn == self._nvml.NVML_SUCCESS
        }

    def _memory(self, handle: Any, part: str) -> int | None:
        return getattr(self._ask("nvmlDeviceGetMemoryInfo", handle), part, None)

    def _ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer; None if the GPU does not have it, or is lost."""
        try:
            return getattr(self._nvml, question)(*arguments)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        if not self.absent:
            self._ask("nvmlShutdown")


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _text(name: Any) -> str | None:
    """Decode a name, which older versions of pynvml return as bytes."""
    return name.decode() if isinstance(name, bytes) else name
