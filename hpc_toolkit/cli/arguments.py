"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.errors import PASSING, ConfigError, RunError, near_miss
from hpc_toolkit.system.options import spelled

if TYPE_CHECKING:
    from collections.abc import Collection
    from collections.abc import Set as AbstractSet
    from pathlib import Path

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


def check_suffix(path: Path, known: Collection[str]) -> None:
    """Raise ConfigError for a file whose format is not known by the end of its name."""
    if path.suffix not in known:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint=near_miss(path.suffix, list(known)))


def check_out(path: Path, known: Collection[str]) -> None:
    """Refuse before the work a file that could not be written after it.

    Raises:
        ConfigError: its format is not known, or nothing can be written there.
    """
    check_suffix(path, known)
    parent = os.path.abspath(path.parent)
    if not os.path.isdir(parent):
        message = f"{path}: there is no directory {parent}"
        raise ConfigError(message, hint="make it, or name another one")
    if os.path.isdir(path) or not os.access(parent, os.W_OK | os.X_OK):
        message = f"{path}: cannot be written there"
        raise ConfigError(message, hint="name a file in a directory that you can write to")


def write_out(path: Path, text: str) -> None:
    """Write a result of the work.

    Raises:
        OSError: one that may pass.
        RunError: the file cannot be written.
    """
    from hpc_toolkit.rundir.files import replace_file

    try:
        replace_file(path, iter([text.encode()]))
    except OSError as error:
        if error.errno in PASSING:
            raise
        message = f"{path}: cannot be written: {error.strerror}"
        raise RunError(message, hint="name a file in a directory that you can write to") from error
