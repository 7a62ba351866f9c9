"""Commands that make and change runs: init, add, seal, retry, try."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import ITEM_HELP, GivenRun, RunArgument, open_run
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.queue.items import parse_items
from hpc_toolkit.system.quantities import parse_duration

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item

_PANEL = "Runs"
_ATTEMPTS = 3

_ITEMS = typer.Option(
    "--items", metavar="FILE.jsonl", help="One JSON object a line; - reads stdin."
)
ItemsOption = Annotated[str, _ITEMS]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(rich_help_panel=_PANEL)(init)
    app.command(rich_help_panel=_PANEL)(add)
    app.command(rich_help_panel=_PANEL)(seal)
    app.command(rich_help_panel=_PANEL)(retry)
    app.command(rich_help_panel=_PANEL)(drain)
    app.command("try", rich_help_panel=_PANEL)(try_)


def read_items(source: str) -> list[Item]:
    """Items from a file of JSON lines, or from stdin."""
    if source == "-":
        return parse_items(sys.stdin.buffer, source="stdin")
    try:
        with Path(source).open("rb") as file:
            return parse_items(file, source=source)
    except OSError as error:
        message = f"cannot read items from {source}: {error.strerror}"
        raise ConfigError(message, hint="give a file of JSON lines, or - for stdin") from error


def init(
    run: GivenRun,
    items: Annotated[str | None, _ITEMS] = None,
    campaign: Annotated[
        Path | None,
        typer.Option(
            metavar="CAMPAIGN.toml", help="Make the run of a campaign, for a job to work on."
        ),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="A function or class to run.")
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help="A shell command; {key} is replaced by the item's value, quoted."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=JSON", help="A keyword argument of a class workload."),
    ] = None,
    group_by: Annotated[
        str | None, typer.Option(metavar="KEY", help="Items of one value are kept together.")
    ] = None,
    max_attempts: Annotated[
        int | None, typer.Option(help="Failures after which an item is failed; 3 by default.")
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Time limit of one item, such as 90s or 5min."),
    ] = None,
    max_failures: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="Pause when more items than this failed. By default a run pauses when its "
            "first 20 distinct items all fail.",
        ),
    ] = None,
    open_: Annotated[
        bool, typer.Option("--open", help="More items will come: do not seal.")
    ] = False,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="SNAPSHOT.json",
            help="Begin from a snapshot: its items, its results as done, and its settings where "
            "no option says otherwise.",
        ),
    ] = None,
) -> None:
    """Make a run: a directory with a list of items and the code that runs them."""
    from hpc_toolkit.run import Run

    timeout_s = parse_duration(timeout, where="--timeout") if timeout is not None else None
    settings = (group_by, max_attempts, timeout_s, max_failures)
    code = (workload, command, option)
    if campaign is not None:
        given = [one for one in (items, from_, *code, *settings) if one is not None]
        _init_campaign(run, campaign, alone=not (open_ or given))
        return
    if from_ is not None:
        _init_from(run, from_, items, code, settings, open_=open_)
        return
    if items is None:
        message = "init needs --items FILE.jsonl, --from SNAPSHOT.json or --campaign CAMPAIGN.toml"
        raise ConfigError(message, hint="--items - reads the items from stdin")
    made = Run.create(
        run,
        read_items(items),
        workload=workload,
        command=command,
        options=_parse_options(option or []),
        group_by=group_by,
        max_attempts=max_attempts if max_attempts is not None else _ATTEMPTS,
        timeout_s=timeout_s,
        max_failures=max_failures,
        open_end=open_,
    )
    print(made.root)


def _init_from(
    run: str,
    snapshot: Path,
    items: str | None,
    code: tuple[str | None, str | None, list[str] | None],
    settings: tuple[str | None, int | None, float | None, str | None],
    *,
    open_: bool,
) -> None:
    """Begin from a snapshot; ``code`` and ``settings`` as the options of init give them."""
    from dataclasses import replace

    from hpc_toolkit.run.snapshot import read_snapshot, restore_run
    from hpc_toolkit.rundir.layout import WorkloadSpec

    if items is not None:
        message = "--from and --items: a run that begins from a snapshot has its items"
        raise ConfigError(message, hint="make it with --open, and 'hpctk add' more")
    found = read_snapshot(snapshot)
    names = ("group_by", "max_attempts", "timeout_s", "max_failures")
    named = zip(names, settings, strict=True)
    changes: dict[str, Any] = {name: value for name, value in named if value is not None}
    workload, command, option = code
    options = _parse_options(option or [])
    if workload is not None or command is not None:
        path = (str(Path.cwd()),) if workload is not None else ()
        changes["workload"] = WorkloadSpec(
            function=workload, command=command, options=options, path=path
        )
    elif options:
        before = found.manifest.stages[0].workload
        changes["workload"] = replace(before, options={**before.options, **options})
    made = restore_run(Path(run), found, changes=changes, open_end=True if open_ else None)
    done = found.counts["done"]
    print(f"{done} of {len(found.items)} items are done already", file=sys.stderr)
    print(made.root)


def _init_campaign(run: str, campaign: Path, *, alone: bool) -> None:
    from hpc_toolkit.campaign.settings import read_campaign
    from hpc_toolkit.cli.campaigns import make_run

    if not alone:
        message = "--campaign: the file says all that a campaign's run needs"
        raise ConfigError(message, hint="leave out the other options")
    print(make_run(Path(run), campaign, read_campaign(campaign)).root)


def _parse_options(pairs: list[str]) -> dict[str, Any]:
    options = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()):
            message = f"--option {pair!r} is not KEY=JSON"
            raise ConfigError(message, hint="such as --option batch_size=16")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


def add(run: GivenRun, items: ItemsOption) -> None:
    """Add items to a run that was made with --open, also while it runs."""
    open_run(run).add(read_items(items))


def seal(run: RunArgument = None) -> None:
    """Say that no more items will come, so that workers leave when all are finished."""
    open_run(run).seal()


def retry(
    run: RunArgument = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="All failed items; this is the default.")
    ] = True,
    item: Annotated[str | None, typer.Option(metavar="ITEM", help=ITEM_HELP)] = None,
    match: Annotated[
        str, typer.Option(metavar="TEXT", help="Only items whose JSON or error contains TEXT.")
    ] = "",
) -> None:
    """Give failed items a full budget of attempts again."""
    found = open_run(run)
    count = found.retry(match=match, item=item)
    print(f"{count} items are pending again", file=sys.stderr)
    if count and not found.status().workers.alive:
        print("no worker is alive: start some with 'hpctk work' or 'hpctk submit'", file=sys.stderr)


def drain(run: RunArgument = None) -> None:
    """Ask the workers of now to finish their item and leave; later ones are not affected."""
    count = open_run(run).drain()
    print(f"{count} workers were asked to leave", file=sys.stderr)


def try_(
    run: RunArgument = None,
    item: Annotated[str, typer.Option(metavar="ITEM", help=ITEM_HELP)] = "0",
) -> None:
    """Run one item here in the foreground, traceback and all; nothing is recorded."""
    from hpc_toolkit.results.explain import find_item
    from hpc_toolkit.rundir.layout import check_trust
    from hpc_toolkit.worker.loading import load_workload

    found_run = open_run(run)
    check_trust(found_run.root)
    found = find_item(found_run.view, item)
    spec = found.stage.spec
    workload = load_workload(spec.workload)
    group = found.item[spec.group_by] if spec.group_by is not None else None
    print(f"item {json.dumps(found.item)}", file=sys.stderr)
    try:
        context = workload.load(group)
        value = next(iter(workload.run(context, iter([found.item]))))
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = "the item failed; nothing was recorded"
        raise HpcToolkitError(message) from error
    print(json.dumps(value, indent=2))
