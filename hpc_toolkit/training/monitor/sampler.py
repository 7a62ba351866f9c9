"""One look at this host and at the processes of one rank or pool."""

from __future__ import annotations

import importlib
import os
import time
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import host_name
from hpc_toolkit.training.monitor.gpus import GpuReader, load_nvml
from hpc_toolkit.training.monitor.infiniband import ROOT, read_ports

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1


def load_psutil() -> Any:
    """The module psutil.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("psutil")
    except ImportError as error:
        message = "the monitor needs psutil, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[monitor]'") from error


class Sampler:
    """Reads the host, and a process with all its descendants.

    Args:
        pid: of that process; by default this one.
        nvml: what stands for pynvml; a test's own.
        infiniband: where the ports are.

    Raises:
        ConfigError: psutil or pynvml is not installed. A host without GPUs is no error.
    """

    def __init__(
        self, *, pid: int | None = None, nvml: Any = None, infiniband: Path = ROOT
    ) -> None:
        self._psutil = load_psutil()
        self._gpus = GpuReader(nvml if nvml is not None else load_nvml())
        self._infiniband = infiniband
        self._process = self._psutil.Process(pid)
        self._began = time.monotonic()
        self._net = self._psutil.net_io_counters()
        self._ports = read_ports(infiniband)
        # What it says of CPUs is since the call before.
        self._psutil.cpu_percent(percpu=True)

    @property
    def no_gpus(self) -> str:
        """Why no GPU is sampled; "" where some are."""
        return self._gpus.absent

    def header(self, interval_s: float) -> dict[str, Any]:
        """What stays as it is, and what the samples begin from."""
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
        """What happened since the sample before, and how much there was since the start.

        CPU percentages are of the whole host since the sample before, and ``rss_bytes`` adds up
        the processes, so that what they share counts more than once. Network and InfiniBand count
        bytes of the whole host since the start.
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
        """Resident bytes of the process and its descendants, and how many they are."""
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
        """Let go of the driver."""
        self._gpus.close()


def _grown(now: Any, before: Any, name: str) -> int | None:
    """How much a counter of the network grew; None on a host without interfaces."""
    if now is None or before is None:
        return None
    return int(getattr(now, name) - getattr(before, name))
