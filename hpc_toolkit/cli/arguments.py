"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.system.options import spelled

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from hpc_toolkit.run import Run


def complete_run(incomplete: str) -> list[str]:
    """Runs whose paths begin so."""
    from hpc_toolkit.rundir.layout import all_runs

    return [str(run) for run in all_runs() if str(run).startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    """Names of clusters that begin so."""
    from hpc_toolkit.slurm.clusters.facts import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]


GivenRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Run directory.", autocompletion=complete_run)
]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Run directory. [default: $HPCTK_RUN, else the only run below ./runs]",
        autocompletion=complete_run,
    ),
]
ITEM_HELP = "Item number, counted from 0, or a part of its JSON."
"""Help of the option ``--item ITEM``, which names an item for every command."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def open_run(given: str | None) -> Run:
    """The run that an argument means."""
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import find_run

    return Run.open(find_run(given))


def refuse_given(context: typer.Context, allowed: AbstractSet[str], why: str) -> None:
    """Refuse options that were given on the command line and would have no effect.

    Raises:
        ConfigError: one that is not among those ``allowed``.
    """
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in allowed and source is not None and source.name == "COMMANDLINE":
            message = f"{spelled(name)} {why}"
            raise ConfigError(message, hint="add what it is for, or leave it out")
