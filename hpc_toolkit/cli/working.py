"""The command ``hpctk work``: its workers' shares of the machine, the monitor, snapshots, Ray."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.cli.help import LIST, TableCommand, add_table_command
from hpc_toolkit.cli.plainwork import (
    check_code,
    collect_garbage,
    with_progress,
    work_here,
    worker_options,
)
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, by_name, only_given, spelled
from hpc_toolkit.system.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.options import Panels
    from hpc_toolkit.system.ranks import RankInfo
    from hpc_toolkit.worker.worker import WorkerOptions

PANELS: Panels = {
    "Resources of each local worker": (
        Option("cpus_per_worker", "Bind each worker to N CPUs, on one NUMA node if possible.", "N"),
        Option(
            "gpus_per_worker",
            "GPUs of each worker; 0.5 shares a GPU between two workers, 0 hides all GPUs. "
            "[default: one each, in turn]",
            "NUMBER",
        ),
        Option(
            "memory_per_worker",
            "Memory limit of each worker's process, e.g. 4G; Python raises MemoryError beyond it.",
            "SIZE",
        ),
    ),
    "Monitoring and snapshots": (
        Option(
            "monitor",
            "Log the use of CPUs, memory, GPUs and network of this host.",
            "",
            variable="HPCTK_MONITOR",
        ),
        Option("monitor_interval", "Time between samples. [default: 1s]", "DURATION", hidden=True),
        Option(
            "snapshot",
            "Write a snapshot at the end; {done} in the name becomes the number of items done.",
            "FILE.json",
        ),
        Option("snapshot_every", "Also write a snapshot whenever N more items are done.", "N"),
    ),
}
"""Options of ``hpctk work``, by the panel of the help that shows them."""


class Engine(StrEnum):
    """What starts the workers."""

    PROCESSES = "processes"
    RAY = "ray"


_EngineOption = Annotated[
    Engine,
    typer.Option(help="Start workers as processes on this machine or as actors of a Ray cluster."),
]
RAY_PANELS: Panels = {
    "Ray": (
        Option(
            "ray_address",
            "Ray cluster; auto uses $RAY_ADDRESS, else starts a local one.",
            "auto|local|HOST:PORT",
        ),
    )
}
"""Every option of Ray's, by the panel of the help that shows it."""


class WorkCommand(TableCommand):
    """``hpctk work``: these options and Ray's, behind those of its function."""

    panels: ClassVar[Panels] = {**PANELS, **RAY_PANELS}


def register(app: typer.Typer) -> None:
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
    engine: _EngineOption = Engine.PROCESSES,
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
        rank = replace(rank, in_step=False)  # the driver of actors is not a rank
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


def read_shares(cpus: int | None, gpus: float | None, memory: str | None, rank: RankInfo) -> Shares:
    """What the options say; a rank of Slurm takes its memory's limit at once.

    Raises:
        ConfigError: a value that no machine can give, or one that srun decides.
    """
    from hpc_toolkit.system.binding import Place, Shares

    size = parse_size(memory, where="--memory-per-worker") if memory is not None else None
    shares = Shares(cpus=cpus, gpus=gpus, memory_bytes=size)
    if rank.in_step:
        for option, value in (("cpus", cpus), ("gpus", gpus)):
            if value is not None:
                message = f"--{option}-per-worker: srun has given this rank its {option}"
                hint = f"render the script with --{option}-per-task, and leave it out here"
                raise ConfigError(message, hint=hint)
        os.environ.update(Place(memory_bytes=size).environment())
    return shares


@contextmanager
def monitored(run: Run, rank: RankInfo, interval: str | None, *, wanted: bool) -> Iterator[None]:
    """Sample this host beside the block; under Slurm one rank of each node does.

    Raises:
        ConfigError: an interval without ``--monitor``, or the packages are missing.
    """
    if interval is not None and not wanted:
        message = "--monitor-interval is for --monitor"
        raise ConfigError(message, hint="add --monitor, or leave it out")
    interval_s = parse_duration(interval, where="--monitor-interval") if interval else 1.0
    if not wanted or rank.local_rank > 0:
        yield
        return
    from hpc_toolkit.system.ranks import host_name
    from hpc_toolkit.training.monitor import watching

    with watching(run.paths.monitor_log(host_name(), os.getpid()), interval_s):
        yield


@contextmanager
def with_snapshots(
    run: Run, rank: RankInfo, pattern: str | None, every: int | None
) -> Iterator[Callable[[], None] | None]:
    """What is to be called a few times a second while the block works; a last snapshot follows it.

    Raises:
        ConfigError: a rank of Slurm is asked, or there is no file, or no place for one.
    """
    if pattern is None and every is None:
        yield None
        return
    if pattern is None:
        message = "--snapshot-every needs --snapshot FILE.json"
        raise ConfigError(message, hint="such as --snapshot 'bench-{done}.json'")
    if rank.in_step:
        message = "--snapshot: a rank of Slurm takes no snapshots"
        raise ConfigError(message, hint="'hpctk snapshot RUN -o FILE' takes one from anywhere")
    from hpc_toolkit.results.snapshots import Snapshots
    from hpc_toolkit.system.clock import SystemClock

    _check_place(pattern)
    snapshots = Snapshots(run.status, run.snapshot, pattern, every, SystemClock())
    try:
        yield snapshots.look
    finally:
        snapshots.take()


def _check_place(pattern: str) -> None:
    """Refuse before the work what could only be told after it.

    Raises:
        ConfigError: no snapshot can be written there.
    """
    path = Path(pattern)
    # Where the number is part of a directory's name, nobody can say yet.
    there = "{done}" in str(path.parent) or os.access(path.parent, os.W_OK | os.X_OK)
    if path.suffix == ".json" and there and not path.is_dir():
        return
    message = f"--snapshot {pattern!r}: no FILE.json can be written there"
    raise ConfigError(
        message, hint="such as --snapshot 'bench-{done}.json', in a directory of yours"
    )


def ray_settings(engine: Engine, values: dict[str, Any], shares: Shares) -> RaySettings | None:
    """What is asked of Ray by the values of its options; None where the workers are processes.

    Raises:
        ConfigError: an option of Ray's without ``--engine ray``, or a value that Ray cannot give.
    """
    from hpc_toolkit.engines.ray.settings import AUTO, RaySettings

    given = only_given({name: values[name] for name in by_name(RAY_PANELS)})
    if engine is not Engine.RAY:
        for name in given:
            message = f"{spelled(name)} is for workers that are actors"
            raise ConfigError(message, hint="add --engine ray, or leave it out")
        return None
    return RaySettings(
        address=given.get("ray_address", AUTO),
        cpus_per_worker=shares.cpus,
        gpus_per_worker=shares.gpus,
        memory_per_worker=shares.memory_bytes,
    )
