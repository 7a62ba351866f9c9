"""The options of ``hpctk work`` that speak of Ray."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.actors.settings import RaySettings

_PANEL = "Ray"


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
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="auto|local|HOST:PORT",
        help="The Ray cluster; auto: that of $RAY_ADDRESS, else a local one for this command.",
        rich_help_panel=_PANEL,
    ),
]
ObjectStoreMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Shared memory of a local Ray, such as 1G.", rich_help_panel=_PANEL
    ),
]
IncludeDashboard = Annotated[
    bool,
    typer.Option(
        "--include-dashboard",
        help="A local Ray serves its dashboard, on 127.0.0.1.",
        rich_help_panel=_PANEL,
    ),
]
DashboardPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Its port.", rich_help_panel=_PANEL)
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        metavar="PORT",
        help="A local Ray serves its metrics for Prometheus there.",
        rich_help_panel=_PANEL,
    ),
]


def ray_settings(
    engine: Engine,
    address: str | None,
    object_store_memory: str | None,
    dashboard_port: int | None,
    metrics_port: int | None,
    *,
    dashboard: bool,
    cpus: float | None = None,
    gpus: float | None = None,
    memory: int | None = None,
) -> RaySettings | None:
    """What is asked of Ray; None where the workers are processes.

    Raises:
        ConfigError: an option of Ray's without ``--engine ray``, or a value that Ray cannot give.
    """
    from hpc_toolkit.actors.settings import AUTO, RaySettings
    from hpc_toolkit.quantities import parse_size

    given = {
        "--ray-address": address is not None,
        "--object-store-memory": object_store_memory is not None,
        "--include-dashboard": dashboard,
        "--dashboard-port": dashboard_port is not None,
        "--metrics-port": metrics_port is not None,
    }
    if engine is not Engine.RAY:
        for option in (name for name, is_given in given.items() if is_given):
            message = f"{option} is for workers that are actors"
            raise ConfigError(message, hint="add --engine ray, or leave it out")
        return None
    return RaySettings(
        address=AUTO if address is None else address,
        cpus_per_worker=cpus,
        gpus_per_worker=gpus,
        memory_per_worker=memory,
        object_store_memory=(
            parse_size(object_store_memory, where="--object-store-memory")
            if object_store_memory is not None
            else None
        ),
        dashboard=dashboard,
        dashboard_port=dashboard_port,
        metrics_port=metrics_port,
    )
