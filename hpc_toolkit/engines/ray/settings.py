"""The user's settings for Ray: the cluster, the resources of a worker, and how many fit."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.ranks import in_step

if TYPE_CHECKING:
    from collections.abc import Mapping

AUTO = "auto"
LOCAL = "local"
_ADDRESS = "RAY_ADDRESS"
_STEPS = 10_000
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """The options of ``hpctk work --engine ray``."""

    address: str = AUTO
    """HOST:PORT of a Ray cluster; ``local`` for one that is started here; ``auto`` for the one that
    RAY_ADDRESS names, else a local one."""
    cpus_per_worker: float | None = None
    """CPUs that Ray counts for a worker; None: one."""
    gpus_per_worker: float | None = None
    """GPUs of a worker, an integer or a fraction of one; None: one if the cluster has any."""
    memory_per_worker: int | None = None
    """Bytes that each process of a worker's executor may allocate; Ray counts them, too."""

    def __post_init__(self) -> None:
        """Refuse values that Ray does not support.

        Raises ConfigError: names the option and its value.
        """
        amounts = {"cpus": self.cpus_per_worker, "gpus": self.gpus_per_worker}
        for what, amount in amounts.items():
            if amount is not None and not 0 <= amount <= 4096:
                message = f"--{what}-per-worker: {amount:g} is not a valid amount"
                raise ConfigError(message, hint="such as 0.5, 1 or 8")
        gpus = self.gpus_per_worker or 0.0
        if gpus > 1 and not gpus.is_integer():
            message = f"--gpus-per-worker: Ray allots whole GPUs or a fraction of one, not {gpus:g}"
            raise ConfigError(message, hint="such as 0.5, 1 or 2")

    def resolve(self, environ: Mapping[str, str] = os.environ) -> str:
        """Return HOST:PORT, or "" for a local cluster.

        Raises ConfigError: the address is invalid, or each of several tasks of a step would start a
        local cluster.
        """
        address = self.address
        if address == AUTO:
            address = environ.get(_ADDRESS, "") or LOCAL
        if address == LOCAL:
            # Each task of the step would start a cluster.
            tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
            if in_step(environ) and tasks not in ("", "1"):
                message = f"each of the {tasks} tasks of this step would start its own Ray"
                raise ConfigError(message, hint="'hpctk render ray' starts one, with one driver")
            return ""
        host, _, port = address.rpartition(":")
        if not (host and port.isdigit() and 1 <= int(port) <= 65535) or "/" in host:
            message = f"the address of a Ray cluster is HOST:PORT, not {address!r}"
            raise ConfigError(message, hint="'auto', 'local', or such as node1:6379")
        return address


def room(nodes: list[dict[str, float]], demand: dict[str, float]) -> int:
    """Return how many workers with this demand fit on the nodes at once, each on one node.

    Args:
        nodes: the resources of each node by Ray's names.
        demand: the resources of a worker by Ray's names; 0 for those that it does not need.
    """
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    if not needed:
        return 1 << 30
    return sum(
        min(_parts(node.get(name, 0.0), amount) for name, amount in needed.items())
        for node in nodes
    )


def demand_of(settings: RaySettings, nodes: list[dict[str, float]]) -> dict[str, float]:
    """Return the resources that Ray counts for each worker, by Ray's names."""
    cpus, gpus = settings.cpus_per_worker, settings.gpus_per_worker
    if gpus is None:
        gpus = 1.0 if any(node.get("GPU") for node in nodes) else 0.0
    return {
        "CPU": 1.0 if cpus is None else cpus,
        "GPU": gpus,
        "memory": float(settings.memory_per_worker or 0),
    }


def check_room(nodes: list[dict[str, float]], demand: dict[str, float], workers: int) -> None:
    """Print a note if some workers must wait; refuse if none would ever start.

    Raises ConfigError: no node has the resources that a worker needs.
    """
    fit = room(nodes, demand)
    if fit >= workers:
        return
    asked = ", ".join(f"{amount:g} {name}" for name, amount in demand.items() if amount)
    if fit == 0:
        message = f"no node of the Ray cluster has {asked} for a worker"
        hint = "request less per worker; 'ray status' shows what is available"
        raise ConfigError(message, hint=hint)
    sys.stderr.write(
        f"note: the Ray cluster has room for {fit} of {workers} workers ({asked} each); "
        "the others wait for more\n"
    )


def _parts(amount: float, part: float) -> int:
    """Return how many workers with ``part`` have room in ``amount``: a part below 1 is of one."""
    if part < 1 < amount:
        return math.floor(amount) * _parts(1.0, part)
    return round(amount * _STEPS) // max(1, round(part * _STEPS))
