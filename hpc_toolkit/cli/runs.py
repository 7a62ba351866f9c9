"""Commands that make a run, list its items and try its code: init, items, try."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperArgument

from hpc_toolkit.cli.arguments import (
    ITEM_HELP,
    GivenRun,
    RunArgument,
    open_run,
    switch,
    value,
    writing,
)
from hpc_toolkit.cli.help import LIST, Commands, add_table_command
from hpc_toolkit.errors import ConfigError, HpcToolkitError, RunError
from hpc_toolkit.queue.items import parse_items
from hpc_toolkit.system.options import Option, many, only_given, spelled
from hpc_toolkit.system.quantities import parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.run import Run
    from hpc_toolkit.system.options import Panels

ITEMS = value(
    "FILE", "Items: .jsonl, .json, .csv or .parquet; - is JSON lines on stdin.", "--items"
)


_SOURCES: Panels = {
    "Items": (
        Option("items", "File: .jsonl, .json, .csv or .parquet; - is stdin.", "FILE"),
        Option("count", "Instead of a file: the numbers 0 to N-1.", "N"),
        Option("key", "Key of the items of --count.", "NAME", default="index"),
        many("grid", "Instead of a file: all combinations of values", "NAME=VALUES"),
    ),
}
_SETTINGS: Panels = {
    "Workload and limits": (
        Option("workload", "Function or class to call for each item.", "MODULE:NAME"),
        Option("command", "Shell command to run for each item; {key} is its value, quoted."),
        many("option", "Keyword argument of a workload class", "KEY=JSON"),
        Option("group_by", "Keep items with the same value of KEY together.", "KEY"),
        Option("max_attempts", "Attempts before an item counts as failed. [default: 3]", "N"),
        Option("timeout", "Time limit of one item, e.g. 90s or 5min.", "DURATION"),
        Option("max_failures", "Pause when more items have failed.", "N|P%", hidden=True),
    )
}
PANELS: Panels = {**_SOURCES, **_SETTINGS}
"""The items of a run, its code and its settings: arguments of Run.create."""

MAP_PANELS: Panels = {
    "Options": (
        Option("run", "Run directory. [default: runs/ and the name of WORKLOAD]", "DIR"),
        Option("workers", "Local workers. [default: one per GPU, else 1]", "N", least=1),
        Option("out", ".jsonl, .json, .csv, .npz or .parquet.", "FILE", short="-o"),
    ),
    **_SOURCES,
    "Limits": tuple(one for one in _SETTINGS["Workload and limits"] if one.name != "workload"),
}


def register(app: typer.Typer) -> None:
    add_table_command(app, init, PANELS, panel=LIST)
    app.command("try", rich_help_panel=LIST)(try_)
    workload: Any = TyperArgument(
        param_decls=["workload"],
        metavar="[MODULE:NAME]",
        help="Function or class to call for each item; --command runs a shell command instead.",
    )
    add_table_command(app, map_, MAP_PANELS, panel=LIST, arguments=[workload], name="map")
    group = Commands(
        help="""Print lists of items for 'hpctk init --items -'.

        Examples:
            hpctk items pythia --sizes 14m,70m --steps 0:143000 > items.jsonl
        """
    )
    group.command("pythia")(pythia)
    app.add_typer(group, name="items", rich_help_panel=LIST, hidden=True)


def read_items(source: str) -> list[Item]:
    if source == "-":
        return parse_items(sys.stdin.buffer, source="stdin")
    from hpc_toolkit.queue.lists import read_list

    try:
        return read_list(Path(source))
    except OSError as error:
        message = f"cannot read items from {source}: {error.strerror}"
        raise ConfigError(
            message, hint="give a file of items, or - for JSON lines on stdin"
        ) from error


def init(
    *,
    run: GivenRun,
    campaign: Annotated[
        Path | None, value("CAMPAIGN.toml", "Create the run of a campaign, e.g. for a Slurm job.")
    ] = None,
    open_: Annotated[bool, switch("--open", "Allow adding items later with 'hpctk add'.")] = False,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="SNAPSHOT.json",
            help="Start from a snapshot: its items, results and settings. Other options override "
            "the settings.",
        ),
    ] = None,
    **given: Any,
) -> None:
    """Create a run: a directory with items and the code to call.

    Examples:
        hpctk init runs/eval --items items.jsonl --workload mymodule:evaluate
        hpctk init runs/bench --count 500 --key seed --command './bench {seed}'
        hpctk init runs/tune --grid lr=0.1,0.01 --grid seed=0:9 --workload work:train
    """
    from hpc_toolkit.run import Run

    sources = _sources(given)
    settings, options = _read_settings(given)
    if campaign is not None:
        alone = not (sources or from_ or open_ or options or settings)
        _init_campaign(run, campaign, alone=alone)
        return
    if from_ is not None:
        if sources:
            one = spelled(next(iter(sources)))
            message = f"--from and {one} exclude each other: a snapshot contains its items"
            raise ConfigError(message, hint="create the run with --open, then 'hpctk add' more")
        _init_from(run, from_, settings, options, open_=open_)
        return
    made = Run.create(run, _make_items(sources), options=options, open_end=open_, **settings)
    print(made.root)


def _sources(given: dict[str, Any]) -> dict[str, Any]:
    """Take the options that name items out of ``given``; only those that were given."""
    found = {name: given.pop(name) for name in ("items", "count", "key", "grid")}
    if found["count"] is None:
        del found["key"]
    return only_given(found)


def _make_items(sources: dict[str, Any]) -> list[Item]:
    from hpc_toolkit.queue.lists import counted, grid

    named = [name for name in sources if name != "key"]
    if len(named) > 1:
        message = f"{' and '.join(map(spelled, named))} exclude each other"
        raise ConfigError(message, hint="name one source of items")
    if named == ["items"]:
        return read_items(sources["items"])
    if named == ["count"]:
        return counted(sources["count"], sources["key"])
    if named == ["grid"]:
        return grid(sources["grid"])
    message = "no items are named"
    hint = "add --items FILE, --count N or --grid NAME=VALUES; init: or --from, or --campaign"
    raise ConfigError(message, hint=hint)


def _read_settings(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a run, and the options of its workload."""
    settings = only_given(given)
    if "timeout" in settings:
        settings["timeout_s"] = parse_duration(settings.pop("timeout"), where="--timeout")
    return settings, _parse_options(settings.pop("option", ()))


def map_(workload: str | None, **given: Any) -> None:
    """Create a run, process its items here and write the results.

    Prints the run's directory. The same command again continues where the last one stopped. Exits
    with 1 if items failed, and with 75 if items are left.

    Examples:
        hpctk map mymodule:evaluate --items items.jsonl --workers 4 -o results.csv
        hpctk map bench:iterate --count 500 --key seed --workers 10 -o results.csv
    """
    from hpc_toolkit.cli.arguments import check_out
    from hpc_toolkit.results.tables import write_table, writer_for
    from hpc_toolkit.results.verification import verify

    root, out, workers = (given.pop(name) for name in ("run", "out", "workers"))
    if out is not None:
        writer_for(Path(out))
        check_out(Path(out), (Path(out).suffix,))
    run = _the_run(workload, root, given)
    print(run.root, flush=True)
    if not run.status().complete:
        _work_here(run, workers)
    rows = run.results()
    problems = verify(rows, run.snapshot().items)
    if out is not None:
        with writing(out):
            write_table(Path(out), rows)
        print(f"{len(rows)} rows in {out}", file=sys.stderr)
    if problems:
        counts = Counter(problem.kind for problem in problems)
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        message = f"{found}, of {len(rows)} items in {run.root}"
        hint = (
            f"see 'hpctk status {run.root}'; fix the cause, 'hpctk retry', and repeat the command"
        )
        raise HpcToolkitError(message, hint=hint)


def _the_run(workload: str | None, root: str | None, given: dict[str, Any]) -> Run:
    """Create the run that ``map`` works on, or open it if it was created with the same arguments.

    Raises ConfigError: other items, code or settings; or a shell command whose run has no name.
    """
    from hpc_toolkit.run import Run, list_stage

    items = _make_items(_sources(given))
    settings, options = _read_settings(given)
    if root is None and workload is None:
        message = "--command: the run has no name"
        raise ConfigError(message, hint="add --run runs/NAME")
    path = Path(root or Path("runs", re.sub(r"[^\w.-]+", "-", workload or "")))
    if not path.exists():
        return Run.create(path, items, workload=workload, options=options, **settings)
    run = Run.open(path)
    wanted = list_stage(workload=workload, options=options, **settings)
    stage = run.manifest.stages[0]
    # The same command in another directory means the same code if the run is the same.
    same_code = replace(wanted, workload=replace(wanted.workload, path=stage.workload.path))
    names = [one.name for one in fields(stage)]
    changed = [one for one in names if getattr(stage, one) != getattr(same_code, one)]
    if run.manifest.campaign is not None or run.snapshot().items != items:
        changed.append("items")
    if changed:
        message = f"{path} was created with other {' and '.join(changed)}"
        raise ConfigError(message, hint="choose another directory with --run, or remove this one")
    return run


def _work_here(run: Run, workers: int | None) -> None:
    from hpc_toolkit.cli.working import check_code, with_progress
    from hpc_toolkit.system.binding import Shares
    from hpc_toolkit.system.gpus import visible_gpus

    check_code(run, strict=False)
    count = workers if workers is not None else Shares().workers_on(len(visible_gpus()))
    if code := with_progress(run, lambda on_tick: run.work(count, on_tick=on_tick)):
        message = f"items are left in {run.root}"
        failure = RunError(message, hint="the same command continues")
        failure.exit_code = code
        raise failure


def _init_from(
    run: str, snapshot: Path, changes: dict[str, Any], options: dict[str, Any], *, open_: bool
) -> None:
    from dataclasses import replace

    from hpc_toolkit.results.snapshots import read_snapshot
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.layout import WorkloadSpec

    found = read_snapshot(snapshot)
    workload, command = changes.pop("workload", None), changes.pop("command", None)
    if workload is not None or command is not None:
        path = (str(Path.cwd()),) if workload is not None else ()
        changes["workload"] = WorkloadSpec(
            function=workload, command=command, options=options, path=path
        )
    elif options:
        before = found.manifest.stages[0].workload
        changes["workload"] = replace(before, options={**before.options, **options})
    made = Run.restore(run, found, changes=changes, open_end=True if open_ else None)
    done = found.counts["done"]
    print(f"{done} of {len(found.items)} items are done already", file=sys.stderr)
    print(made.root)


def _init_campaign(run: str, campaign: Path, *, alone: bool) -> None:
    from hpc_toolkit.campaign.settings import read_campaign
    from hpc_toolkit.cli.campaigns import make_run

    if not alone:
        message = "--campaign: no other option can be given"
        raise ConfigError(message, hint="put all settings into the campaign file")
    print(make_run(Path(run), campaign, read_campaign(campaign)).root)


def _parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
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


def try_(
    run: RunArgument = None,
    item: Annotated[str, value("ITEM", ITEM_HELP)] = "0",
) -> None:
    """Run one item in the foreground without recording it.

    Prints the value, or the traceback if the item fails.

    Examples:
        hpctk try runs/eval
        hpctk try runs/eval --item '"layer": 3'
    """
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


def pythia(
    sizes: Annotated[str, value("14m,70m,...", "Model sizes: all, or a list.")],
    steps: Annotated[
        str, value("STEPS", "all, or steps, FIRST:LAST (all checkpoints) and FIRST:LAST:STRIDE.")
    ],
    layers: Annotated[
        str, value("LAYERS", "blocks (1 to L), all (with 0, the embeddings), last, or 0,4:12:4.")
    ] = "blocks",
    deduped: Annotated[bool, switch("--deduped", "Use the deduplicated models.")] = False,
    checkpoint: Annotated[str | None, value("NAME", "Format of checkpoint names.")] = None,
) -> None:
    """Print an item for each layer of each checkpoint of Pythia models.

    Examples:
        hpctk items pythia --sizes 14m,70m --steps 0,1000:143000:1000 > items.jsonl
        hpctk items pythia --sizes 14m --steps all --layers last > items.jsonl
    """
    from hpc_toolkit.science.workloads.pythia import (
        HUB,
        parse_sizes,
        parse_steps,
        pythia_items,
        suspects,
    )

    chosen_sizes, chosen_steps = parse_sizes(sizes), parse_steps(steps)
    name = checkpoint or HUB
    items = pythia_items(chosen_sizes, chosen_steps, layers, deduped=deduped, checkpoint=name)
    sys.stdout.writelines(f"{json.dumps(item)}\n" for item in items)
    sys.stdout.flush()  # warnings follow the items also where both go to one pipe
    if not deduped:
        for line in suspects(chosen_sizes, chosen_steps):
            print(f"warning: {line}", file=sys.stderr)
