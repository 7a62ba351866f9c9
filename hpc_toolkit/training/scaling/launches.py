"""The launches of a scaling run: one for each world size, here or as a job of its own."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.training.scaling.settings import cases

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.training.scaling.settings import Settings, Variation

MODULE = "hpc_toolkit.training.scaling.program"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRun:
    """What is measured, where it is written, and at which world sizes."""

    directory: Path
    """Records, the ranks' logs and the monitor's samples go below it."""
    world_sizes: tuple[int, ...]
    settings: Settings
    variations: tuple[Variation, ...] = ()
    cluster: str = ""
    """The cluster whose jobs measure; "" for this machine."""

    def check(self) -> None:
        """Refuse what a rank would refuse, before any is started. Raises ConfigError."""
        for case in cases(self.settings, self.variations):
            case.settings.decoder()
            for size in self.world_sizes:
                case.settings.batch_per_rank(size, self.world_sizes)

    def first_repeats(self, count: int) -> ScalingRun:
        """The same with no more than so many repeats; what is measured of them is not repeated."""
        return replace(self, settings=replace(self.settings, repeats=count))

    def words(self) -> list[str]:
        """The arguments of the measured program; they are the same at every world size."""
        varied = [word for one in self.variations for word in ("--vary", one.word)]
        where = ["--cluster", self.cluster] if self.cluster else []
        return [*self.settings.words(), *varied, *where, "-o", str(self.directory)]

    def measurements(self) -> int:
        """How many records each world size shall have."""
        return self.settings.repeats * len(cases(self.settings, self.variations))


def with_equal_threads(run: ScalingRun) -> ScalingRun:
    """The run with as many threads for each rank as the largest world size has CPUs for.

    Without it one rank would compute with all CPUs of this machine and two with half of them each,
    which measures no scaling. Settings that name threads are left alone.
    """
    if run.settings.threads:
        return run
    threads = max(1, len(os.sched_getaffinity(0)) // max(run.world_sizes))
    return replace(run, settings=replace(run.settings, threads=threads))


def launch_here(run: ScalingRun, world_size: int, *, backend: str | None = None) -> int:
    """Measure one world size by ranks of this machine; the exit code, 0 or 75.

    Raises:
        HpcToolkitError: a rank failed, or could not be started.
        OSError: the disk is full.
    """
    from hpc_toolkit.training.launch.launch import launch
    from hpc_toolkit.training.launch.plan import Request
    from hpc_toolkit.training.scaling.place import check_room

    options = {"nproc_per_node": world_size, "module": True, "redirects": "3"}
    arguments = tuple(run.words())
    request = Request(
        script=MODULE,
        arguments=arguments,
        options=options,
        backend=backend,
        run_dir=run.directory,
    )
    try:
        outcome = launch(request)
        if outcome.error is not None:
            raise outcome.error
    except Exception:
        # On a full disk ranks fail in whatever way, and their logs have no room for the reason.
        check_room(run.directory)
        raise
    return outcome.code


def nodes_of(world_size: int, per_node: int) -> int:
    """Nodes that so many ranks need.

    Raises:
        ConfigError: the last node would have fewer than the others.
    """
    if world_size > per_node and world_size % per_node:
        message = f"--world-sizes: {world_size} ranks do not fill nodes of {per_node}"
        raise ConfigError(message, hint=f"take multiples of {per_node}, or --ranks-per-node")
    return max(1, world_size // per_node)
