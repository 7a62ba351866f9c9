"""The options of ``hpctk work`` that speak of Ray."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, by_name, flag, only_given, spelled

if TYPE_CHECKING:
    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.options import Panels


class Engine(StrEnum):
    """What starts the workers."""

    PROCESSES = "processes"
    RAY = "ray"


EngineOption = Annotated[
    Engine,
    typer.Option(help="Start workers as processes on this machine or as actors of a Ray cluster."),
]
PANELS: Panels = {
    "Ray": (
        Option(
            "ray_address",
            "Ray cluster; auto uses $RAY_ADDRESS, else starts a local one.",
            "auto|local|HOST:PORT",
        ),
        Option(
            "object_store_memory",
            "Shared memory of a local Ray cluster, e.g. 1G.",
            "SIZE",
            hidden=True,
        ),
        flag(
            "include_dashboard",
            "Serve the dashboard of a local Ray cluster on 127.0.0.1.",
            hidden=True,
        ),
        Option("dashboard_port", "Port of the dashboard.", "PORT", hidden=True),
        Option(
            "metrics_port",
            "Serve metrics of a local Ray cluster for Prometheus on this port.",
            "PORT",
            hidden=True,
        ),
    )
}
"""Every option of Ray's, by the panel of the help that shows it."""


def ray_settings(engine: Engine, values: dict[str, Any], shares: Shares) -> RaySettings | None:
    """What is asked of Ray by the values of its options; None where the workers are processes.

    Raises:
        ConfigError: an option of Ray's without ``--engine ray``, or a value that Ray cannot give.
    """
    from hpc_toolkit.engines.ray.settings import AUTO, RaySettings
    from hpc_toolkit.system.quantities import parse_size

    given = only_given({name: values[name] for name in by_name(PANELS)})
    if engine is not Engine.RAY:
        for name in given:
            message = f"{spelled(name)} is for workers that are actors"
            raise ConfigError(message, hint="add --engine ray, or leave it out")
        return None
    memory = given.get("object_store_memory")
    return RaySettings(
        address=given.get("ray_address", AUTO),
        cpus_per_worker=shares.cpus,
        gpus_per_worker=shares.gpus,
        memory_per_worker=shares.memory_bytes,
        object_store_memory=(
            parse_size(memory, where="--object-store-memory") if memory is not None else None
        ),
        dashboard=given.get("include_dashboard", False),
        dashboard_port=given.get("dashboard_port"),
        metrics_port=given.get("metrics_port"),
    )
