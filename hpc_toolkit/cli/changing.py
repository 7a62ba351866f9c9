"""Commands that change a run: add, seal, retry, drain."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import ITEM_HELP, GivenRun, RunArgument, open_run, switch
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.cli.runs import ITEMS, read_items
from hpc_toolkit.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LIST)(add)
    app.command(rich_help_panel=LIST, hidden=True)(seal)
    app.command(rich_help_panel=LIST)(retry)
    app.command(rich_help_panel=LIST)(drain)


def add(
    run: GivenRun,
    items: Annotated[str | None, ITEMS] = None,
    seal: Annotated[
        bool, switch("--seal", "Allow no further items; workers exit when done.")
    ] = False,
) -> None:
    """Add items to a run created with --open, or seal it.

    Workers may be running. They wait for more items until the run is sealed.

    Examples:
        hpctk add runs/eval --items more.jsonl
        hpctk add runs/eval --seal
    """
    if items is None and not seal:
        message = "add needs --items FILE.jsonl, --seal or both"
        raise ConfigError(message, hint="--items - reads the items from stdin")
    found = open_run(run)
    if items is not None:
        found.add(read_items(items))
    if seal:
        found.seal()


def seal(run: RunArgument = None) -> None:
    """Allow no further items, so that workers exit when all are finished.

    Examples:
        hpctk seal runs/eval
    """
    open_run(run).seal()


def retry(
    run: RunArgument = None,
    item: Annotated[str | None, typer.Option(metavar="ITEM", help=ITEM_HELP)] = None,
    match: Annotated[
        str,
        typer.Option(metavar="TEXT", help="Retry only items whose JSON or error contains TEXT."),
    ] = "",
) -> None:
    """Run failed items again, with a fresh set of attempts.

    Examples:
        hpctk retry runs/eval
        hpctk retry runs/eval --match OutOfMemoryError
    """
    found = open_run(run)
    count = found.retry(match=match, item=item)
    print(f"{count} items are pending again", file=sys.stderr)
    if count and not found.status().workers.alive:
        print("no worker is alive: start some with 'hpctk work' or 'hpctk submit'", file=sys.stderr)


def drain(run: RunArgument = None) -> None:
    """Ask running workers to exit after their current item.

    Workers that start later are not affected.

    Examples:
        hpctk drain runs/eval
    """
    count = open_run(run).drain()
    print(f"{count} workers were asked to leave", file=sys.stderr)
