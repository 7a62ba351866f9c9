"""The command that works: ``hpctk work``."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.cli.optiontable import add_table_command
from hpc_toolkit.cli.plainwork import (
    check_code,
    collect_garbage,
    with_progress,
    work_here,
    worker_options,
)
from hpc_toolkit.cli.rayoptions import Engine, EngineOption, ray_settings
from hpc_toolkit.cli.workoptions import WorkCommand, monitored, read_shares, with_snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.run import Run
    from hpc_toolkit.worker.worker import WorkerOptions


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    add_table_command(app, work, WorkCommand, panel=LIST)


def work(
    *,
    run: RunArgument = None,
    workers: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Local workers, outside srun. [default: one per GPU, else 1]"
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Exit before this time: a duration or @EPOCH. [default: the end of the Slurm "
            "job, else $HPCTK_DEADLINE]",
        ),
    ] = None,
    idle_exit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Exit after this time without work. [default: 10min in Slurm, else never]",
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            hidden=True,
            help="Time without a heartbeat after which a worker on another host counts as dead.",
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            hidden=True,
            help="Time to finish the current item when asked to exit.",
        ),
    ] = None,
    strict_code: Annotated[
        bool, typer.Option("--strict-code", help="Fail if the code has changed since init.")
    ] = False,
    engine: EngineOption = Engine.PROCESSES,
    **given: Any,
) -> None:
    """Process the items of a run with local workers.

    Inside an srun step this process becomes one worker; with --engine ray the workers are actors.
    Exits with 0 when all items are finished, failed items included, and with 75 when items are left
    because time is up or the worker was asked to exit.

    Examples:
        hpctk work runs/eval --workers 4
        hpctk work runs/eval --deadline 2h --monitor
    """
    from hpc_toolkit.system.ranks import RankInfo

    found = open_run(run)
    check_code(found, strict=strict_code)
    options = worker_options(deadline, idle_exit, lease, grace)
    rank = RankInfo.from_environ()
    if engine is Engine.RAY:
        rank = replace(rank, in_step=False)  # the driver of actors is no rank
    shares = read_shares(
        given["cpus_per_worker"], given["gpus_per_worker"], given["memory_per_worker"], rank
    )
    settings = ray_settings(engine, given, shares)
    collect_garbage()
    with (
        monitored(found, rank, given["monitor_interval"], wanted=bool(given["monitor"])),
        with_snapshots(found, rank, given["snapshot"], given["snapshot_every"]) as look,
    ):
        if settings is not None:
            code = work_on_actors(found, workers, options, settings, look=look)
        elif rank.in_step:
            code = found.work(None, options)
        else:
            code = work_here(found, workers, options, shares=shares, look=look)
    sys.exit(code)


def work_on_actors(
    run: Run,
    workers: int | None,
    options: WorkerOptions,
    settings: RaySettings,
    *,
    look: Callable[[], None] | None = None,
) -> int:
    """Workers that are actors of a Ray cluster, with the same bar; the exit code."""
    from hpc_toolkit.engines.ray.engine import work_on_ray

    return with_progress(
        run, lambda on_tick: work_on_ray(run, workers, options, settings, on_tick), look
    )
