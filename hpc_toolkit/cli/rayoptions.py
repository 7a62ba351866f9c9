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
    typer.Option(
        help="What starts the workers: processes of this machine, or actors of a Ray cluster."
    ),
]
PANELS: Panels = {
    "Ray": (
        Option(
            "ray_address",
            "The Ray cluster; auto: that of $RAY_ADDRESS, else a local one for this command.",
            "auto|local|HOST:PORT",
        ),
        Option("object_store_memory", "Shared memory of a local Ray, such as 1G.", "SIZE"),
        flag("include_dashboard", "A local Ray serves its dashboard, on 127.0.0.1."),
        Option("dashboard_port", "Its port.", "PORT"),
        Option("metrics_port", "A local Ray serves its metrics for Prometheus there.", "PORT"),
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
