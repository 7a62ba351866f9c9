"""What job scripts ask, and people hardly ever do: preflight, stage, left, giveback."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.system.quantities import parse_duration, parse_size


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(hidden=True)(preflight)
    app.command(hidden=True)(stage)
    app.command(hidden=True)(left)
    app.command(hidden=True)(giveback)


def preflight(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run that ranks will write to.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that must be usable here.")] = 0,
    free: Annotated[
        str, typer.Option(metavar="SIZE", help="Space that must be free below RUN.")
    ] = "100M",
) -> None:
    """Say in one line whether this node can do its part of a job; exits with 1 if not."""
    from hpc_toolkit.slurm.batch.preflight import check_node

    root = Path(run) if run is not None else None
    report = check_node(root, gpus=gpus, free_bytes=parse_size(free, where="--free"))
    print(report.line(), file=sys.stderr if report.problems else sys.stdout)
    sys.exit(1 if report.problems else 0)


def stage(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="On this node's own disk.")],
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="What is copied there.")],
    users: Annotated[int, typer.Option(help="How many tasks of this node will use it.")] = 1,
) -> None:
    """Copy files and directories to this node's disk, below a directory of its name."""
    import signal

    from hpc_toolkit.slurm.batch.staging import stage_paths
    from hpc_toolkit.system.ranks import host_name

    # The warning of the time limit goes to all steps of a job; the ranks are to act on it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # The script looks for the copies below Slurm's name of the node, whatever HPCTK_HOST says.
    host = os.environ.get("SLURMD_NODENAME") or host_name()
    said = stage_paths([Path(path) for path in paths], Path(directory) / host, users=users)
    print(f"{host}: {said}")


def left(
    run: RunArgument = None,
    watch: Annotated[
        str,
        typer.Option(metavar="TIME", help="Longest watch over workers of other jobs."),
    ] = "1min",
) -> None:
    """Print how many items are not finished, whether the run is complete or open, and, where other
    jobs hold all of these items, how many of them belong to workers that are alive."""
    from hpc_toolkit.results.status import held_elsewhere
    from hpc_toolkit.system.clock import SystemClock
    from hpc_toolkit.system.ranks import RankInfo

    opened, watch_s = open_run(run), parse_duration(watch, where="--watch")
    status = opened.status()
    if status.complete:
        print(0, "complete", 0)
        return
    count = sum(stage.pending + stage.leased for stage in status.stages.values())
    job = RankInfo.from_environ().job_id
    print(count, "open", held_elsewhere(opened.view, SystemClock(), job=job, watch_s=watch_s))


def giveback(
    run: RunArgument = None,
    every: Annotated[
        str, typer.Option(metavar="TIME", help="How often to look which ranks have left.")
    ] = "1min",
) -> None:
    """Give nodes of this job back to Slurm when all their ranks have left, until one is left."""
    from hpc_toolkit.slurm.batch.giveback import give_back
    from hpc_toolkit.slurm.client import SlurmError
    from hpc_toolkit.system.processes import die_with_parent

    # Else it would outlive the script, which does not wait for it.
    die_with_parent()
    gc.enable()
    paths, every_s = open_run(run).paths, parse_duration(every, where="--every")
    try:
        for nodes in give_back(paths, every_s=every_s):
            print(f"gave back {' '.join(nodes)}: their ranks have left", flush=True)
    except SlurmError as error:
        # The job goes on with all of its nodes.
        print(f"note: no node is given back: {error.message}", file=sys.stderr)
