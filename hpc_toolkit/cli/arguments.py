"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from hpc_toolkit.errors import ConfigError, RunError, exit_code_of, near_miss
from hpc_toolkit.system.options import Option
from hpc_toolkit.system.terminal import note, printable

if TYPE_CHECKING:
    from hpc_toolkit.run import Run
    from hpc_toolkit.slurm.clusters.facts import Cluster


def complete_run(incomplete: str) -> list[str]:
    from hpc_toolkit.rundir.layout import all_runs

    return [str(run) for run in all_runs() if str(run).startswith(incomplete)]


def complete_cluster(incomplete: str) -> list[str]:
    from hpc_toolkit.slurm.clusters.facts import cluster_names

    return [name for name in cluster_names() if name.startswith(incomplete)]


class Argument(NamedTuple):
    """How an argument of a command is shown; it annotates the type of a function's parameter."""

    metavar: str
    help: str
    complete: Callable[[str], list[str]] | None = None
    """Returns shell completions of an incomplete word."""


def switch(name: str, text: str, *more_names: str) -> Option:
    """An option without a value."""
    return value("", text, name, *more_names)


def value(metavar: str, text: str, *names: str, **more: Any) -> Option:
    """An option with a value; without ``names`` it is called like its parameter."""
    long = "".join(name for name in names if name.startswith("--"))
    short = "".join(name for name in names if not name.startswith("--"))
    name = long.removeprefix("--").replace("-", "_")
    return Option(name, text, metavar, short=short, **more)


GivenRun = Annotated[str, Argument("RUN", "Run directory.", complete=complete_run)]
_RUN_HELP = "Run directory. [default: $HPCTK_RUN, else the only run below ./runs]"
RunArgument = Annotated[str | None, Argument("[RUN]", _RUN_HELP, complete=complete_run)]
ITEM_HELP = "Item number, counted from 0, or a part of its JSON."
"""Help of the option ``--item ITEM``, which names an item for every command."""

JsonOption = Annotated[bool, switch("--json", "Print JSON.")]


def open_run(given: str | None) -> Run:
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import find_run

    return Run.open(find_run(given))


def find_cluster(given: str | None) -> Cluster:
    """The cluster that an option names, else the one of this machine; says how it was found."""
    from hpc_toolkit.slurm.clusters.choice import resolve_cluster

    found = resolve_cluster(given)
    for text in found.notes:
        note(text)
    return found.cluster


def show(record: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print ``record`` as JSON, or ``lines`` for people."""
    texts = [json.dumps(record, allow_nan=False)] if as_json else map(printable, lines)
    print("".join(f"{text}\n" for text in texts), end="", flush=True)


def check_out(path: Path, known: Collection[str]) -> None:
    """Refuse before the work a file that could not be written after it."""
    if path.suffix not in known:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint=near_miss(path.suffix, list(known)))
    parent = os.path.abspath(path.parent)
    if not os.path.isdir(parent):
        message = f"{path}: there is no directory {parent}"
        raise ConfigError(message, hint="create it, or name another directory")
    if os.path.isdir(path) or not os.access(parent, os.W_OK | os.X_OK):
        message = f"{path}: cannot be written there"
        raise ConfigError(message, hint="name a file in a directory that you can write to")


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Say why the block could not write a file; the exit code is 75 for an error that may pass."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        hint = "fix that, or name another file; nothing else is lost"
        raise RunError(message, hint=hint, exit_code=exit_code_of(error)) from error


def write_out(path: Path, text: str) -> None:
    from hpc_toolkit.rundir.files import replace_file

    with writing(path):
        replace_file(path, iter([text.encode()]))
