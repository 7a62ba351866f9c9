"""What NVIDIA's driver says of the GPUs, by its own library (NVML), read through pynvml."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def load_nvml() -> Any:
    """The module pynvml.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        message = "the monitor needs pynvml, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[monitor]'") from error


class GpuReader:
    """Asks the driver for all GPUs that it shows this process, whatever CUDA is told to use."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self.absent = ""
        """Why there is nothing to read; "" where there is."""
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except nvml.NVMLError as error:
            self.absent = str(error)

    def facts(self) -> list[dict[str, Any]]:
        """What does not change: index, name, UUID, memory in bytes, the power limit in watts."""
        return [self._facts(index, handle) for index, handle in enumerate(self._handles)]

    def _facts(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "index": index,
            "name": self._ask(lambda: _text(nvml.nvmlDeviceGetName(handle))),
            "uuid": self._ask(lambda: _text(nvml.nvmlDeviceGetUUID(handle))),
            "memory_bytes": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power_limit_w": self._ask(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        }

    def read(self) -> list[dict[str, Any]]:
        """What each GPU does now; None for what it does not tell.

        ``busy_percent`` is the share of the driver's last sample period in which some kernel ran,
        which says nothing of how much of the GPU that kernel used.
        """
        return [self._read(index, handle) for index, handle in enumerate(self._handles)]

    def _read(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        rates = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        return {
            "index": index,
            "busy_percent": None if rates is None else rates.gpu,
            "memory_busy_percent": None if rates is None else rates.memory,
            "memory_used_bytes": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "power_w": self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        }

    def _ask(self, question: Callable[[], Any]) -> Any:
        """The answer; None where this GPU has none, or is lost."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Let go of the driver."""
        if not self.absent:
            self._ask(self._nvml.nvmlShutdown)


def _text(name: Any) -> str:
    """Older versions of pynvml give bytes."""
    return name.decode() if isinstance(name, bytes) else str(name)
