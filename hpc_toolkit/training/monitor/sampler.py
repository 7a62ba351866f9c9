"""Sample this host, its InfiniBand ports, and the processes of one rank or pool."""

from __future__ import annotations

import importlib
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.gpus import GpuReader
from hpc_toolkit.system.ranks import host_name

ROOT = Path("/sys/class/infiniband")
_WORD_BYTES = 4
"""``port_xmit_data`` and ``port_rcv_data`` count words (sysfs-class-infiniband of the kernel)."""
_COUNTERS = {"sent_bytes": "port_xmit_data", "received_bytes": "port_rcv_data"}


def read_ports(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return the bytes of every port since its reset, by ``device/port``; empty without ports."""
    found = {}
    for counters in sorted(root.glob("*/ports/*/counters")):
        port: dict[str, Any] = {}
        for name, file in _COUNTERS.items():
            # Reading a port that is down may fail.
            with suppress(OSError, ValueError):
                port[name] = int((counters / file).read_text(encoding="ascii")) * _WORD_BYTES
        if port:
            found[f"{counters.parts[-4]}/{counters.parts[-2]}"] = port
    return found


FORMAT = 1


def load(package: str) -> Any:
    """Import psutil or pynvml.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        message = f"the monitor needs {package}, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[monitor]'") from error


class Sampler:
    """Reads the host, and a process with all its descendants.

    Args:
        pid: id of that process; by default this process.
        nvml: replacement for pynvml in tests.
        infiniband: directory of the ports.

    Raises:
        ConfigError: psutil or pynvml is not installed. A host without GPUs is not an error.
    """

    def __init__(
        self, *, pid: int | None = None, nvml: Any = None, infiniband: Path = ROOT
    ) -> None:
        self._psutil = load("psutil")
        self._gpus = GpuReader(nvml if nvml is not None else load("pynvml"))
        self._infiniband = infiniband
        self._process = self._psutil.Process(pid)
        self._began = time.monotonic()
        self._net = self._psutil.net_io_counters()
        self._ports = read_ports(infiniband)
        # The percentages of a call cover the time since the previous call.
        self._psutil.cpu_percent(percpu=True)

    @property
    def no_gpus(self) -> str:
        """Why no GPU is sampled; "" if NVML can be used."""
        return self._gpus.absent

    def header(self, interval_s: float) -> dict[str, Any]:
        """Return the facts that do not change, and the time of the start."""
        return {
            "type": "header",
            "format": FORMAT,
            "host": host_name(),
            "pid": self._process.pid,
            "started": round(time.time(), 3),
            "interval_s": interval_s,
            "cpus": os.cpu_count(),
            "cpus_allowed": sorted(os.sched_getaffinity(0)),
            "memory_bytes": self._psutil.virtual_memory().total,
            "gpus": self._gpus.facts(),
            "no_gpus": self.no_gpus,
            "infiniband": list(self._ports),
        }

    def sample(self) -> dict[str, Any]:
        """Return the load since the previous sample, and the traffic since the start.

        CPU percentages cover all CPUs of the host since the previous sample. ``rss_bytes`` is the
        sum over the processes, so that memory they share counts more than once. Network and
        InfiniBand count bytes of all processes of the host since the start.
        """
        cpus = self._psutil.cpu_percent(percpu=True)
        memory = self._psutil.virtual_memory()
        net = self._psutil.net_io_counters()
        rss, processes = self._memory_of_all()
        ports = read_ports(self._infiniband)
        return {
            "type": "sample",
            "t_s": round(time.monotonic() - self._began, 3),
            "cpu_percent": round(sum(cpus) / max(1, len(cpus)), 1),
            "each_cpu_percent": cpus,
            "rss_bytes": rss,
            "processes": processes,
            "memory_used_bytes": memory.total - memory.available,
            "net_sent_bytes": _grown(net, self._net, "bytes_sent"),
            "net_received_bytes": _grown(net, self._net, "bytes_recv"),
            "gpus": self._gpus.read(),
            "infiniband": {
                port: {name: value - self._ports[port].get(name, 0) for name, value in now.items()}
                for port, now in ports.items()
                if port in self._ports
            },
        }

    def _memory_of_all(self) -> tuple[int, int]:
        """Return the resident bytes of the process and its descendants, and their number."""
        rss = count = 0
        try:
            family = [self._process, *self._process.children(recursive=True)]
        except self._psutil.Error:
            return 0, 0
        for process in family:
            if process.pid == os.getpid() != self._process.pid:
                continue  # the monitor's own child
            try:
                rss += process.memory_info().rss
                count += 1
            except self._psutil.Error:  # it ended in between
                continue
        return rss, count

    def close(self) -> None:
        """Shut down NVML."""
        self._gpus.close()


def _grown(now: Any, before: Any, name: str) -> int | None:
    """Return how much a network counter grew; None on a host without interfaces."""
    if now is None or before is None:
        return None
    return int(getattr(now, name) - getattr(before, name))
