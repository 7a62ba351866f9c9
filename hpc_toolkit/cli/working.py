"""The command that works: ``hpctk work``."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.cli.optiontable import add_table_command
from hpc_toolkit.cli.rayoptions import Engine, EngineOption, ray_settings
from hpc_toolkit.cli.workoptions import (
    WorkCommand,
    monitored,
    read_shares,
    show_places,
    with_snapshots,
)
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.quantities import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.worker.worker import WorkerOptions

_IDLE_EXIT_IN_SLURM_S = 600.0
_LEAVE_BEFORE_END_S = 30.0


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
            metavar="TIME",
            help="Exit before this time: a duration or @EPOCH. [default: the end of the Slurm "
            "job, else $HPCTK_DEADLINE]",
        ),
    ] = None,
    idle_exit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Exit after this time without work. [default: 10min in Slurm, else never]",
        ),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            hidden=True,
            help="Time without a heartbeat after which a worker on another host counts as dead.",
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
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
    options = _options(deadline, idle_exit, lease, grace)
    rank = RankInfo.from_environ()
    if engine is Engine.RAY:
        rank = replace(rank, in_step=False)  # the driver of actors is no rank
    shares = read_shares(
        given["cpus_per_worker"], given["gpus_per_worker"], given["memory_per_worker"], rank
    )
    settings = ray_settings(engine, given, shares)
    # From here on there may be garbage; what was imported is none, and need not be looked at.
    gc.freeze()
    gc.enable()
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


def work_here(
    run: Run,
    workers: int | None,
    options: WorkerOptions,
    *,
    shares: Shares | None = None,
    look: Callable[[], None] | None = None,
) -> int:
    """Local workers with a progress bar where there is a terminal; the exit code."""
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.gpus import visible_gpus

    shares = shares if shares is not None else Shares()
    count = workers if workers is not None else shares.workers_on(len(visible_gpus()))
    if shares:
        show_places(shares, count)
    work = partial(run.work, count, options, shares=shares)
    return _shown(run, lambda on_tick: work(on_tick=on_tick), look)


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

    return _shown(run, lambda on_tick: work_on_ray(run, workers, options, settings, on_tick), look)


def _shown(
    run: Run,
    work_on: Callable[[Callable[[], None] | None], int],
    look: Callable[[], None] | None,
) -> int:
    """Work with what is to be called meanwhile: a progress bar on a terminal, and ``look``."""
    if not sys.stderr.isatty():
        return work_on(look)
    from hpc_toolkit.cli.progress import RunProgress

    with RunProgress(run) as progress:

        def on_tick() -> None:
            progress.tick()
            if look is not None:
                look()

        return work_on(on_tick)


def check_code(run: Run, *, strict: bool) -> None:
    """Warn, or refuse, when a workload's file is not the one that the run was made with.

    Raises:
        ConfigError: it changed, and ``strict`` is set.
    """
    from hpc_toolkit.worker.loading import code_hash

    for stage in run.manifest.stages:
        before = run.manifest.provenance.get("code", {}).get(stage.name)
        now = code_hash(stage.workload)
        if before is None or now == before or (now is None and not strict):
            continue
        what = "changed since init" if now is not None else "is in no file that can be found"
        message = f"the code of stage {stage.name!r}, {stage.workload.function}, {what}"
        if strict:
            raise ConfigError(message, hint="make a new run, or leave out --strict-code")
        print(f"warning: {message}", file=sys.stderr)


def _options(
    deadline: str | None, idle_exit: str | None, lease: str | None, grace: str | None
) -> WorkerOptions:
    from hpc_toolkit.worker.worker import WorkerOptions

    defaults = WorkerOptions()
    in_slurm = "SLURM_JOB_ID" in os.environ
    idle_exit_s = parse_duration(idle_exit, where="--idle-exit") if idle_exit is not None else None
    if idle_exit is None and in_slurm:
        idle_exit_s = _IDLE_EXIT_IN_SLURM_S
    return WorkerOptions(
        lease_s=parse_duration(lease, where="--lease") if lease is not None else defaults.lease_s,
        deadline=_deadline(deadline),
        idle_exit_s=idle_exit_s,
        grace_s=parse_duration(grace, where="--grace") if grace is not None else defaults.grace_s,
    )


def _deadline(given: str | None) -> float | None:
    """Epoch seconds by which to be gone."""
    if given is not None and not given.startswith("@"):
        return time.time() + parse_duration(given, where="--deadline")
    # Slurm 23 sets the first anew in each job; the rendered scripts set the second for older ones,
    # and a job that was submitted inside another may have inherited the other's.
    job_end = os.environ.get("SLURM_JOB_END_TIME") or os.environ.get("HPCTK_DEADLINE")
    text, margin = (given[1:], 0.0) if given is not None else (job_end, _LEAVE_BEFORE_END_S)
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if math.isfinite(found):
        return found - margin
    message = f"deadline {text!r} is not a number of seconds since the epoch"
    raise ConfigError(message, hint="such as --deadline 2h or --deadline @1790000000")
