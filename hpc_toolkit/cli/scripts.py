"""Commands that job scripts run on their nodes, and people hardly ever: preflight, stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.help import SCRIPTS
from hpc_toolkit.system.quantities import parse_size


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(rich_help_panel=SCRIPTS, hidden=True)(preflight)
    app.command(rich_help_panel=SCRIPTS, hidden=True)(stage)


def preflight(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run that the ranks write to.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that must be usable on this node.")] = 0,
    free: Annotated[str, typer.Option(metavar="SIZE", help="Free space required in RUN.")] = "100M",
) -> None:
    """Check this node before a job uses it; exit with 1 on a problem.

    Examples:
        hpctk preflight runs/eval --gpus 4
    """
    from hpc_toolkit.slurm.batch.preflight import check_node

    root = Path(run) if run is not None else None
    report = check_node(root, gpus=gpus, free_bytes=parse_size(free, where="--free"))
    print(report.line(), file=sys.stderr if report.problems else sys.stdout)
    sys.exit(1 if report.problems else 0)


def stage(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory on this node's disk.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files and directories to copy.")
    ],
    users: Annotated[int, typer.Option(help="Tasks on this node that use the copies.")] = 1,
) -> None:
    """Copy files to this node's disk, below a directory of its name.

    Examples:
        hpctk stage /tmp/data /scratch/me/corpus
    """
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
