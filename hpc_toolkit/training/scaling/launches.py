"""The launches of a scaling run: one for each world size, on this machine or as its own job."""

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
    """The measurements to make: settings, world sizes and output directory."""

    directory: Path
    """Directory of the records, the ranks' logs and the monitor's samples."""
    world_sizes: tuple[int, ...]
    settings: Settings
    variations: tuple[Variation, ...] = ()
    cluster: str = ""
    """The cluster whose jobs measure; "" for this machine."""

    def check(self) -> None:
        """Reject settings that a rank would reject, before any is started. Raises ConfigError."""
        for case in cases(self.settings, self.variations):
            case.settings.decoder()
            for size in self.world_sizes:
                case.settings.batch_per_rank(size, self.world_sizes)

    def first_repeats(self, count: int) -> ScalingRun:
        """Return the run with ``count`` repeats; existing measurements of them are kept."""
        return replace(self, settings=replace(self.settings, repeats=count))

    def words(self) -> list[str]:
        """Return the measured program's arguments, which are the same at every world size."""
        varied = [word for one in self.variations for word in ("--vary", one.word)]
        where = ["--cluster", self.cluster] if self.cluster else []
        return [*self.settings.words(), *varied, *where, "-o", str(self.directory)]

    def measurements(self) -> int:
        """Return how many records each world size should have."""
        return self.settings.repeats * len(cases(self.settings, self.variations))


def with_equal_threads(run: ScalingRun) -> ScalingRun:
    """Return the run with one number of threads per rank that fits the largest world size.

    Otherwise one rank would compute with all CPUs of this machine and two with half of them each,
    which does not measure scaling. A number of threads in the settings is kept.
    """
    if run.settings.threads:
        return run
    threads = max(1, len(os.sched_getaffinity(0)) // max(run.world_sizes))
    return replace(run, settings=replace(run.settings, threads=threads))


def launch_here(run: ScalingRun, world_size: int, *, backend: str | None = None) -> int:
    """Measure one world size with ranks on this machine; return the exit code, 0 or 75.

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
        # Ranks fail in many ways on a full disk, and their logs have no room for the reason.
        check_room(run.directory)
        raise
    return outcome.code


def nodes_of(world_size: int, per_node: int) -> int:
    """Return the number of nodes that ``world_size`` ranks need.

    Raises:
        ConfigError: the last node would have fewer ranks than the others.
    """
    if world_size > per_node and world_size % per_node:
        message = f"--world-sizes: {world_size} ranks do not fill nodes of {per_node}"
        raise ConfigError(message, hint=f"take multiples of {per_node}, or --ranks-per-node")
    return max(1, world_size // per_node)
