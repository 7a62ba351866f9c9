"""The command ``hpctk work``: its workers' shares of the machine, the monitor, snapshots, Ray."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.cli.arguments import RunArgument, check_out, open_run
from hpc_toolkit.cli.help import LIST, add_table_command
from hpc_toolkit.cli.plainwork import (
    check_code,
    collect_garbage,
    with_progress,
    work_here,
    worker_options,
)
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option, flag
from hpc_toolkit.system.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import typer

    from hpc_toolkit.engines.ray.settings import RaySettings
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.options import Panels
    from hpc_toolkit.system.ranks import RankInfo

PANELS: Panels = {
    "Options": (
        Option("workers", "Local workers, outside srun. [default: one per GPU, else 1]", "N"),
        Option(
            "deadline", "Exit before this time, or @EPOCH. [default: the job's end]", "DURATION"
        ),
        Option(
            "idle_exit", "Exit after this time without work. [default: 10min in Slurm]", "DURATION"
        ),
        Option("lease", "Silence after which a remote worker is dead.", "DURATION", hidden=True),
        Option("grace", "Time to finish an item when asked to exit.", "DURATION", hidden=True),
        flag("strict_code", "Fail if the code has changed since init."),
        Option("engine", "Start processes or actors of Ray.", "processes|ray", default="processes"),
    ),
    "Resources of each local worker": (
        Option("cpus_per_worker", "Bind each worker to N CPUs, on one NUMA node if possible.", "N"),
        Option(
            "gpus_per_worker", "GPUs; 0.5 shares one, 0 hides all. [default: one each]", "NUMBER"
        ),
        Option("memory_per_worker", "Memory limit; Python raises MemoryError beyond it.", "SIZE"),
    ),
    "Monitoring and snapshots": (
        Option("monitor", "Log the load of this host.", "", variable="HPCTK_MONITOR"),
        Option("monitor_interval", "Time between samples. [default: 1s]", "DURATION", hidden=True),
        Option("snapshot", "Write a snapshot at the end; {done} counts done items.", "FILE.json"),
        Option("snapshot_every", "Also write a snapshot whenever N more items are done.", "N"),
    ),
    "Ray": (
        Option(
            "ray_address",
            "Cluster. [default: auto: $RAY_ADDRESS, else local]",
            "auto|local|HOST:PORT",
        ),
    ),
}
"""Options of ``hpctk work``, by the panel of the help that shows them."""


def register(app: typer.Typer) -> None:
    add_table_command(app, work, PANELS, panel=LIST)


def work(*, run: RunArgument = None, **given: Any) -> None:
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
    check_code(found, strict=given["strict_code"])
    options = worker_options(*(given[name] for name in ("deadline", "idle_exit", "lease", "grace")))
    rank = RankInfo.from_environ()
    workers, on_ray = given["workers"], given["engine"] == "ray"
    if on_ray:
        rank = replace(rank, in_step=False)  # the driver of actors is not a rank
    shares = read_shares(
        given["cpus_per_worker"], given["gpus_per_worker"], given["memory_per_worker"], rank
    )
    settings = ray_settings(given["ray_address"], shares, on_ray=on_ray)
    collect_garbage()
    with (
        monitored(found, rank, given["monitor_interval"], wanted=bool(given["monitor"])),
        with_snapshots(found, rank, given["snapshot"], given["snapshot_every"]) as look,
    ):
        if settings is not None:
            from hpc_toolkit.engines.ray.engine import work_on_ray

            work_on = partial(work_on_ray, found, workers, options, settings)
            code = with_progress(found, work_on, look)
        elif rank.in_step:
            code = found.work(None, options)
        else:
            code = work_here(found, workers, options, shares=shares, look=look)
    sys.exit(code)


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

    if "{done}" not in str(Path(pattern).parent):
        check_out(Path(pattern), (".json",))
    snapshots = Snapshots(run.status, run.snapshot, pattern, every, SystemClock())
    try:
        yield snapshots.look
    finally:
        snapshots.take()


def ray_settings(address: str | None, shares: Shares, *, on_ray: bool) -> RaySettings | None:
    """The settings of Ray; None where the workers are processes.

    Raises:
        ConfigError: an address without ``--engine ray``, or a value that Ray cannot give.
    """
    from hpc_toolkit.engines.ray.settings import AUTO, RaySettings

    if on_ray:
        return RaySettings(
            address=address if address is not None else AUTO,
            cpus_per_worker=shares.cpus,
            gpus_per_worker=shares.gpus,
            memory_per_worker=shares.memory_bytes,
        )
    if address is not None:
        message = "--ray-address is for workers that are actors"
        raise ConfigError(message, hint="add --engine ray, or leave it out")
    return None
