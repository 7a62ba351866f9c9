"""Options of ``hpctk work``: what each worker has of this machine, the monitor, snapshots."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.cli import rayoptions
from hpc_toolkit.cli.optiontable import TableCommand
from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import Option
from hpc_toolkit.system.quantities import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.run import Run
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.options import Panels
    from hpc_toolkit.system.ranks import RankInfo

PANELS: Panels = {
    "Resources of each local worker": (
        Option(
            "cpus_per_worker",
            "Bind each worker to N CPUs, on one NUMA node if possible.",
            "N",
        ),
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


class WorkCommand(TableCommand):
    """``hpctk work``: these options and Ray's, behind those of its function."""

    panels: ClassVar[Panels] = {**PANELS, **rayoptions.PANELS}


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
    from hpc_toolkit.run.snapshot import Snapshots

    _check_place(pattern)
    snapshots = Snapshots(run, pattern, every)
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
