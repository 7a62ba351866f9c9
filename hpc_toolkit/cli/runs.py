"""Commands before a run works: init, items pythia, items fetch, try, trust."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli.arguments import (
    ITEM_HELP,
    GivenRun,
    RunArgument,
    argument,
    open_run,
    switch,
    value,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.cli.lists import PANELS, make_items, note_types, read_items, read_settings
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.queue.lists import Types
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import BY_ITEM, BY_NAME, WorkloadSpec
from hpc_toolkit.rundir.trust import OWNER, check_trust, trusted, trusted_file
from hpc_toolkit.system.options import spelled
from hpc_toolkit.system.quantities import counted, format_size
from hpc_toolkit.system.terminal import note, printable

_MOST_JOBS = 64


def register(app: Commands) -> None:
    app.add(init, PANELS, panel=LIST)
    app.add(try_, name="try", panel=LIST)
    group = Commands(
        "items",
        panel=LIST,
        hidden=True,
        help="""Print lists of items, and download the checkpoints that they name.

        Examples:
            hpctk items pythia --sizes 14m,70m --steps 0:143000 > items.jsonl
            hpctk items fetch items.jsonl
        """,
    )
    group.add(pythia)
    group.add(fetch)
    app.add_command(group)
    app.add(trust, panel=LIST, hidden=True)


def trust(
    directories: Annotated[
        list[Path] | None, argument("[DIR]...", "Runs, or directories of runs.")
    ] = None,
    *,
    owner: Annotated[
        list[str] | None, value("USER", "Trust all runs of a user. May be repeated.")
    ] = None,
    remove: Annotated[bool, switch("--remove", "Trust them no longer.")] = False,
) -> None:
    """Trust runs of other users, whose code then runs as you.

    Prints what you trust: directories with everything below them, and owners. Everyone who can
    write to a trusted directory can run code as you. Runs that everybody can write to stay refused.

    Examples:
        hpctk trust /project/abc/runs
        hpctk trust --owner alice
        hpctk trust --remove /project/abc/runs
    """
    entries = {f"{OWNER}{name}" for name in owner or ()}
    for path in directories or ():
        entries.add(os.path.realpath(path))
        if not (remove or path.is_dir()) or "\n" in os.path.realpath(path):
            message = f"{path} is not a directory, or its name has several lines"
            raise ConfigError(message, hint="name a run, or a directory of runs")
        if not remove and path.stat().st_mode & stat.S_IWOTH:
            message = f"{path} is world-writable: everybody could run code as you"
            raise ConfigError(message, hint=f"chmod o-w {str(path)!r}, or name a directory in it")
    file, before = trusted_file(), set(trusted())
    if (now := before - entries if remove else before | entries) != before:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, (f"{entry}\n".encode() for entry in sorted(now)), 0o600)
    for entry in sorted(now):
        print(printable(entry))


def init(
    *,
    run: GivenRun,
    campaign: Annotated[
        Path | None, value("CAMPAIGN.toml", "Create the run of a campaign, e.g. for a Slurm job.")
    ] = None,
    open_: Annotated[bool, switch("--open", "Allow adding items later with 'hpctk add'.")] = False,
    copy_code: Annotated[
        bool, switch("--copy-code", "Copy your code into the run, for its workers.")
    ] = False,
    from_: Annotated[
        Path | None,
        value(
            "SNAPSHOT.json",
            "Start from a snapshot: its items, results and settings. Other options override "
            "the settings.",
            "--from",
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

    sources, settings, options = read_settings(given)
    open_ = open_ or settings.pop("open", False)
    if campaign is not None:
        from hpc_toolkit.campaign.settings import read_campaign
        from hpc_toolkit.cli.campaigns import make_run

        if sources or from_ or open_ or copy_code or options or settings:
            message = "--campaign: no other option can be given"
            raise ConfigError(message, hint="put all settings into the campaign file")
        print(make_run(Path(run), campaign, read_campaign(campaign)).root)
        return
    if from_ is not None:
        if sources:
            one = spelled(next(iter(sources)))
            message = f"--from and {one} exclude each other: a snapshot contains its items"
            raise ConfigError(message, hint="create the run with --open, then 'hpctk add' more")
        how = {"open_end": True if open_ else None, "copy_code": copy_code}
        _init_from(run, from_, settings, options, **how)
        return
    types = Types()
    items = types.note(make_items(sources, settings.get("command")))
    made = Run.create(run, items, options=options, open_end=open_, copy_code=copy_code, **settings)
    _show_made(made)
    note_types(types, sources)


def _init_from(
    run: str, snapshot: Path, changes: dict[str, Any], options: dict[str, Any], **how: Any
) -> None:
    from hpc_toolkit.results.snapshots import read_snapshot

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
    made = Run.restore(run, found, changes=changes, **how)
    done = len(found.kept)
    print(f"{done} of {len(found.items)} items are done already", file=sys.stderr)
    _show_made(made)


def _show_made(run: Run) -> None:
    """Print the run's directory, and on stderr how its items are divided into units."""
    log = StageLog(run.paths.stage(run.manifest.stages[0].name))
    log.poll()
    sizes = [unit.count for segment in log.segments.values() for unit in segment.units]
    print(run.root, flush=True)
    if run.manifest.provenance["copied"]:
        names = ", ".join(run.manifest.provenance["files"]["items"])
        print(f"copied to {run.paths.code}: {names}", file=sys.stderr)
    if not sizes:
        print(f"0 items; 'hpctk add {run.root} --items FILE' adds some", file=sys.stderr)
        return
    each = str(min(sizes)) + (f" to {max(sizes)}" if min(sizes) < max(sizes) else "")
    items, units = counted(sum(sizes), "item"), counted(len(sizes), "unit")
    print(f"{items} in {units} of {each}; one claim takes a unit", file=sys.stderr)
    work = run.manifest.stages[0].workload
    if work.call:
        given = "**item" if work.call == BY_NAME else BY_ITEM
        print(f"calls {work.function}({given})", file=sys.stderr)


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
    from hpc_toolkit.worker.attempts import try_item
    from hpc_toolkit.worker.code import executed
    from hpc_toolkit.worker.loading import load_workload

    found_run = open_run(run)
    check_trust(found_run.root)
    found = find_item(found_run.view, item)
    spec = executed(found_run.paths, found_run.manifest)[found.stage.spec.name]
    workload = load_workload(spec.workload, pipefail=spec.pipefail)
    group = found.item[spec.group_by] if spec.group_by is not None else None
    print(f"item {json.dumps(found.item)}", file=sys.stderr)
    line = try_item(workload, group, found.item)
    if "value" not in line:
        sys.stderr.write(line["traceback"])
        raise HpcToolkitError(f"the item failed, and nothing was recorded: {line['error']}")
    print(json.dumps(line["value"], indent=2))


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
            note(line, "warning")


def fetch(
    items: Annotated[str, argument("FILE", "Items, a campaign (.toml), or - for stdin.")],
    jobs: Annotated[int, value("N", "Checkpoints to download at once.")] = 4,
    dry_run: Annotated[bool, switch("--dry-run", "Only show the sizes.")] = False,
) -> None:
    """Download the checkpoints of items into the cache of the hub.

    Shows the sizes first. Repeat the command to continue a download that was interrupted.

    Examples:
        hpctk items fetch campaign.toml
        hpctk items pythia --sizes 14m --steps 0 | hpctk items fetch -
    """
    from hpc_toolkit.campaign.settings import read_campaign
    from hpc_toolkit.science.workloads.fetching import download, needs, on_hub

    if not 1 <= jobs <= _MOST_JOBS:
        raise ConfigError(f"--jobs: {jobs} downloads at once", hint=f"give 1 to {_MOST_JOBS}")
    arms = read_campaign(Path(items)).arms() if items.endswith(".toml") else None
    names = on_hub(read_items(items) if arms is None else (arm.item() for arm in arms))
    found = needs(names, jobs)
    for error, times in Counter(found.errors.values()).items():
        first = next(name for name, one in found.errors.items() if one == error)
        more = f" and {times - 1} more" if times > 1 else ""
        note(f"{first}{more}: {error}", "warning")
    total, free = format_size(found.total), format_size(found.free)
    print(f"{len(found.checkpoints)} checkpoints to download, {total}; {found.cached} in the cache")
    print(f"{found.cache}: {free} free")
    found.check_space()
    failed = len(found.errors)
    wanted = () if dry_run else found.checkpoints
    for number, (name, fault) in enumerate(download(wanted, jobs), start=1):
        failed += fault is not None
        what = f"failed: {fault}" if fault else format_size(found.sizes[name])
        print(f"{number} of {len(found.checkpoints)}: {name}  {what}", flush=True)
    if failed:
        message = f"{failed} of {len(names)} checkpoints are missing"
        raise HpcToolkitError(message, hint="repeat the command to try them again")
