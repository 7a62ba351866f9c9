"""The state of GPUs as NVIDIA's driver reports it, through its library NVML and pynvml."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def load_nvml() -> Any:
    """Import pynvml.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        message = "the monitor needs pynvml, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[monitor]'") from error


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

    def facts(self) -> list[dict[str, Any]]:
        """Return each GPU's constants: index, name, UUID, memory in bytes, power limit in watts."""
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
        """Return the current state of each GPU; None for a value that it does not report.

        ``busy_percent`` is the share of the driver's last sample period in which some kernel ran.
        It does not show how much of the GPU that kernel used.
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
        """Return the answer; None if the GPU does not have it, or is lost."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Shut down NVML."""
        if not self.absent:
            self._ask(self._nvml.nvmlShutdown)


def _text(name: Any) -> str:
    """Decode a name, which older versions of pynvml return as bytes."""
    return name.decode() if isinstance(name, bytes) else str(name)
