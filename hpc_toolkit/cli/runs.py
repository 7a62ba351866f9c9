"""Commands before a run works: init, items pythia, items fetch, try, trust."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Annotated, Any

from hpc_toolkit.cli import lists
from hpc_toolkit.cli.arguments import (
    ITEM_HELP,
    Argument,
    GivenRun,
    RunArgument,
    open_run,
    switch,
    value,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.queue.lists import Types
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import BY_ITEM, BY_NAME, StageSpec, shown_item
from hpc_toolkit.rundir.trust import OWNER, check_trust, refuse_untrusted, trusted, trusted_file
from hpc_toolkit.system.options import only_given, spelled
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import printable


def register(app: Commands) -> None:
    app.add(init, lists.PANELS, panel=LIST)
    app.add(try_, name="try", panel=LIST)
    group = Commands(
        "items",
        panel=LIST,
        hidden=True,
        help="""Print lists of items, and download the checkpoints and data sets that they need.

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
        list[Path] | None, Argument("[DIR]...", "Runs, or directories of runs.")
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
    **given: Any,
) -> None:
    """Create a run: a directory with items and the code to call.

    Examples:
        hpctk init runs/eval --items items.jsonl --workload mymodule:evaluate
        hpctk init runs/bench --count 500 --key seed --command './bench {seed}'
        hpctk init runs/tune --grid lr=0.1,0.01 --grid seed=0:9 --workload work:train
    """
    file = given.get("config")
    if file is not None and (stages := lists.read_stages(Path(file))) is not None:
        others = only_given({**given, "campaign": campaign, "open": open_ or None})
        for name in others.keys() - {"config"}:
            message = f"{spelled(name)}: {file} has stages, each with its own options"
            raise ConfigError(message, hint="write it into the table of a stage")
        _show_made(Run.create(run, stages=stages, copy_code=copy_code))
        return
    sources, settings, options = lists.read_settings(given)
    open_ = open_ or settings.pop("open", False)
    if campaign is not None:
        from hpc_toolkit.campaign.settings import read_campaign
        from hpc_toolkit.cli.campaigns import make_campaign_run

        if sources or open_ or copy_code or options or settings:
            message = "--campaign: no other option can be given"
            raise ConfigError(message, hint="put all settings into the campaign file")
        wanted = read_campaign(campaign)
        print(make_campaign_run(Path(run), wanted, str(campaign)).root)
        return
    types = Types()
    items = types.note(lists.make_items(sources, settings.get("command")))
    settings |= {"options": options, "open_end": open_, "copy_code": copy_code}
    with lists.located(sources):
        made = Run.create(run, items, **settings)
    _show_made(made)
    lists.note_types(types, sources)


def _show_made(run: Run) -> None:
    """Print the run's directory, and on stderr how its items are divided into units."""
    print(run.root, flush=True)
    stages = run.manifest.stages
    if run.manifest.provenance["copied"]:
        files = run.manifest.provenance["files"]
        names = ", ".join({name: None for stage in stages for name in files.get(stage.name, ())})
        print(f"copied to {run.paths.code}: {names}", file=sys.stderr)
    for stage in stages:
        name = f"{stage.name}: " if len(stages) > 1 else ""
        log = StageLog(run.paths.stage(stage.name))
        log.poll()
        sizes = [unit.count for segment in log.segments.values() for unit in segment.units]
        if not sizes and not stage.after:
            print(f"0 items; 'hpctk add {run.root} --items FILE' adds some", file=sys.stderr)
            return
        text = f"after {' and '.join(stage.after)}"
        if stage.after == (stage.name,):
            from hpc_toolkit.queue.graph import GRAPH, Graph  # few lists have one

            total = len(Graph(log.paths.root / GRAPH))
            text = f"{counted(total, 'item')}; {sum(sizes)} with no item before"
        elif sizes:
            each = str(min(sizes)) + (f" to {max(sizes)}" if min(sizes) < max(sizes) else "")
            items, units = counted(sum(sizes), "item"), counted(len(sizes), "unit")
            text = f"{items} in {units} of {each}; one claim takes a unit"
        print(f"{name}{text}", file=sys.stderr)
        if call := stage.workload.call:
            given = "**item" if call == BY_NAME else BY_ITEM
            print(f"{name}calls {stage.workload.function}({given})", file=sys.stderr)


def try_(run: RunArgument = None, item: Annotated[str, value("ITEM", ITEM_HELP)] = "0") -> None:
    """Run one item in the foreground without recording it.

    Prints the value, or the traceback if the item fails.

    Examples:
        hpctk try runs/eval
        hpctk try runs/eval --item '"layer": 3'
    """
    from hpc_toolkit.results.explain import find_item
    from hpc_toolkit.worker.attempts import restored, try_item
    from hpc_toolkit.worker.code import executed
    from hpc_toolkit.worker.loading import load_workload

    found_run = open_run(run)
    check_trust(found_run.root)
    found = find_item(found_run.view, item)
    spec = executed(found_run.paths, found_run.manifest)[found.stage.spec.name]
    workload = load_workload(spec.workload, pipefail=spec.pipefail)
    group = found.item[spec.group_by] if spec.group_by is not None else None
    print(f"item {json.dumps(shown_item(found.item))}", file=sys.stderr)
    own = None if spec.workload.command else str(found_run.paths.values("try"))
    line = try_item(workload, group, restored(found.item, own))
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
    checkpoint: Annotated[str | None, value("NAME", "Format of checkpoint names.")] = None,
) -> None:
    """Print an item for each layer of each checkpoint of Pythia models.

    Examples:
        hpctk items pythia --sizes 14m,70m --steps 0,1000:143000:1000 > items.jsonl
        hpctk items pythia --sizes 14m --steps all --layers last > items.jsonl
    """
    from hpc_toolkit.science.workloads.pythia import HUB, parse_sizes, parse_steps, pythia_items

    chosen_sizes, chosen_steps = parse_sizes(sizes), parse_steps(steps)
    items = pythia_items(chosen_sizes, chosen_steps, layers, checkpoint=checkpoint or HUB)
    sys.stdout.writelines(f"{json.dumps(item)}\n" for item in items)


def fetch(
    source: Annotated[
        str, Argument("SOURCE", "Run, campaign (.toml), file of items, or - for stdin.")
    ],
    jobs: Annotated[int, value("N", "Checkpoints to download at once.", least=1, most=64)] = 4,
    offline: Annotated[
        bool, switch("--offline", "Download nothing; show what a job without network would lack.")
    ] = False,
) -> None:
    """Download the checkpoints of items, and the data sets of a run's or campaign's tasks.

    Repeat the command to continue a download that was interrupted.

    Examples:
        hpctk items fetch campaign.toml
        hpctk items fetch runs/eval --offline && hpctk submit --run runs/eval
        hpctk items pythia --sizes 14m --steps 0 | hpctk items fetch -
    """
    from hpc_toolkit.science.workloads.checkpoints import on_hub

    if offline:  # before anything imports the hub
        os.environ["HF_HUB_OFFLINE"] = "1"
    items, stage, given = _named_in(source)
    names = on_hub(items, needed=stage is None)
    missing = []
    if names and (failed := _fetch_checkpoints(names, jobs, offline=offline)):
        missing.append(f"{failed} of {len(names)} checkpoints")
    if stage is not None and (lacking := _fetch_data(stage, given)):
        missing.append(counted(lacking, "data set"))
    if missing:
        hint = "repeat the command without --offline, where there is a network"
        hint = hint if offline else "repeat the command to try them again"
        raise HpcToolkitError(f"missing: {' and '.join(missing)}", hint=hint)


def _fetch_checkpoints(names: list[str], jobs: int, *, offline: bool) -> int:
    """Download checkpoints, or look for them in the cache; return how many are missing."""
    from hpc_toolkit.science.workloads.checkpoints import download

    failed = 0
    for number, (name, fault) in enumerate(download(names, jobs, check=offline), start=1):
        failed += fault is not None
        if fault or not offline:
            said = printable(f"{name}: {fault}" if fault else name)
            print(f"{number} of {len(names)}: {said}", flush=True)
    print(f"{len(names) - failed} of {len(names)} checkpoints are in the cache")
    return failed


def _fetch_data(stage: StageSpec, items: list[dict[str, Any]]) -> int:
    """Let a workload load the data sets of items; return how many are missing."""
    from hpc_toolkit.worker.loading import caller_path, load_workload

    failed = 0
    with caller_path():
        workload: Any = load_workload(stage.workload)
        for name, fault in workload.fetch(items):
            failed += bool(fault)
            print(printable(fault or f"data set of {name}: ready"), flush=True)
    return failed


def _named_in(source: str) -> tuple[list[dict[str, Any]], StageSpec | None, list[dict[str, Any]]]:
    """The items of a source; and if it has a workload with ``fetch``, its stage and items."""
    from hpc_toolkit.campaign.arms import TASK
    from hpc_toolkit.campaign.settings import read_campaign, settings_of
    from hpc_toolkit.worker.code import executed
    from hpc_toolkit.worker.loading import caller_path, load_object

    campaign = None
    if source.endswith(".toml"):
        campaign = read_campaign(Path(source))
        stage = campaign.stages(campaign.path)[-1]
        items = []
    elif source != "-" and Path(source).is_dir():
        run = open_run(source)
        refuse_untrusted(run.root)
        stage = executed(run.paths, run.manifest)[run.manifest.stages[-1].name]
        if run.manifest.campaign is not None:
            campaign = settings_of(run.paths, run.manifest)
        run.view.poll_logs()
        segments = run.view.stages[stage.name].log.segments.values()
        items = [json.loads(line) for segment in segments for line in segment.items()]
    else:
        return list(lists.read_items(source)), None, []
    given = items
    if campaign is not None:
        items = [arm.item() for arm in campaign.arms()]
        given = [{**item, TASK: name} for item in items for name in campaign.tasks.names]
    with caller_path():
        name = stage.workload.function
        able = name is not None and hasattr(load_object(name, stage.workload.path), "fetch")
    return items, stage if able else None, given
