"""Query NVIDIA's driver about the GPUs of this node, by its own library (NVML reference)."""

from __future__ import annotations

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_WORDS = 96
"""Bytes of the longest name that the library returns (NVML_DEVICE_NAME_V2_BUFFER_SIZE)."""


class _Memory(ctypes.Structure):
    """``nvmlMemory_t``, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def ask_driver(library: str = _LIBRARY) -> dict[str, Any] | None:
    """Query the driver; None if there is no driver. May never return.

    Returns:
        Only ``error`` if the driver does not work. Otherwise ``driver``, its version; ``cuda``, the
        newest CUDA that it runs, as 1000 * major + 10 * minor; and ``gpus``, each with ``name``,
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
    version, cuda = ctypes.create_string_buffer(_WORDS), ctypes.c_int(0)
    nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(_WORDS))
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    count = ctypes.c_uint(0)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    gpus = [_ask_gpu(nvml, index) for index in range(count.value)]
    nvml.nvmlShutdown()
    return {"driver": version.value.decode(), "cuda": cuda.value, "gpus": gpus}


def _ask_gpu(nvml: ctypes.CDLL, index: int) -> dict[str, Any]:
    """Query one GPU. A GPU that fell off the bus is listed, but a query of its memory fails."""
    device, name = ctypes.c_void_p(), ctypes.create_string_buffer(_WORDS)
    memory = _Memory()
    code = (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
        or nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_WORDS))
        or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    )
    if code:
        return {"error": _reason(nvml, code)}
    return {"name": name.value.decode(), "total": memory.total, "free": memory.free}


def _reason(nvml: ctypes.CDLL, code: int) -> str:
    words: bytes | None = nvml.nvmlErrorString(code)
    return words.decode() if words else f"error {code}"
