"""What job scripts ask, and people hardly ever do: preflight, left."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.quantities import parse_size


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(hidden=True)(preflight)
    app.command(hidden=True)(left)


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
    from hpc_toolkit.preflight import check_node

    root = Path(run) if run is not None else None
    report = check_node(root, gpus=gpus, free_bytes=parse_size(free, where="--free"))
    print(report.line(), file=sys.stderr if report.problems else sys.stdout)
    sys.exit(1 if report.problems else 0)


def left(run: RunArgument = None) -> None:
    """Print how many items are not finished, whether the run is complete or open, and how many of
    these items living workers outside this job hold."""
    from hpc_toolkit.clock import SystemClock
    from hpc_toolkit.ranks import RankInfo
    from hpc_toolkit.status import held_elsewhere

    opened = open_run(run)
    status = opened.status()
    count = sum(stage.pending + stage.leased for stage in status.stages.values())
    elsewhere = held_elsewhere(opened.view, SystemClock(), job=RankInfo.from_environ().job_id)
    print(*(0, "complete", 0) if status.complete else (count, "open", elsewhere))
