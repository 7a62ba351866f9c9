"""Commands that search: campaigns, and studies of Optuna."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import (
    Argument,
    JsonOption,
    RunArgument,
    open_run,
    show,
    switch,
    value,
)
from hpc_toolkit.cli.gathering import write_at_end
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.cli.lists import SETTINGS, read_settings
from hpc_toolkit.cli.working import FAIL_ON_FAILED, exit_code, with_progress
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.report.panel import panel
from hpc_toolkit.report.terminal import draw
from hpc_toolkit.run import Run, create_run
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import Manifest
from hpc_toolkit.rundir.trust import check_trust
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.options import Option, Panels
from hpc_toolkit.system.processes import Supervisor, die_with_parent
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.worker.worker import WorkerOptions

_NOT_HERE = {"workload", "command", "pipefail", "option", "group_by", "items_per_claim"}
_SEVERAL = "minimize or maximize; of several objectives: minimize,maximize."
_STUDY: Panels = {
    "Options": (
        Option("trials", "Number of trials; each has one result.", "N", least=1),
        Option("workers", "Local workers; 0 only creates the run.", "N", default=1, least=0),
        Option("run", "Run directory. [default: runs/MODULE-NAME]", "DIR"),
        Option("sampler", "Optuna's sampler.", "tpe|gp|cmaes|random", default="tpe"),
        Option("pruner", "Optuna's pruner.", "hyperband|median|none", default="none"),
        Option("direction", _SEVERAL, "NAMES", short="--directions", default="minimize"),
        Option("seed", "Seed of the sampler.", "N"),
    ),
    "Limits": tuple(one for one in SETTINGS["Workload and limits"] if one.name not in _NOT_HERE),
}
_RIVAL_S = 10.0
"""Another coordinator may be killed, and then none would decide. If it is not, the one that looked
last goes on."""
_PAUSE_S = 0.05


def register(app: Commands) -> None:
    group = Commands(
        "campaign",
        panel=SEARCH,
        help="""Find the best of many arms within a budget.

        Examples:
            hpctk campaign plan campaign.toml
            hpctk campaign run campaign.toml
        """,
    )
    group.add(plan)
    group.add(run_campaign, name="run")
    group.add(coordinate, hidden=True)
    app.add_command(group)
    app.add(study, _STUDY, panel=SEARCH)


def plan(
    campaign: Annotated[Path, Argument("CAMPAIGN.toml", "Campaign file.")],
    workers: Annotated[
        int | None, value("N", "Workers that will run, for the hours.", least=1)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a campaign and show what it would do; starts and downloads nothing.

    Examples:
        hpctk campaign plan campaign.toml
        hpctk campaign plan campaign.toml --workers 32
    """
    from hpc_toolkit.campaign.coordinator import dry_run
    from hpc_toolkit.campaign.settings import read_campaign

    found = dry_run(read_campaign(campaign), str(campaign))
    show(found, plan_lines(found, workers), as_json=as_json)


def plan_lines(found: dict[str, Any], workers: int | None) -> list[str]:
    tasks = counted(len(found["tasks"]), "task")
    evaluations = f"{counted(found['evaluations'], 'evaluation')} in all"
    kinds = ", ".join(f"{key} ({kind})" for key, kind in found["features"].items())
    kinds = kinds or "none: only random and racing can search"
    lines = [
        f"campaign        {found['name']}: {counted(found['arms'], 'arm')}, {tasks}, {evaluations}",
        *textwrap.wrap(f"features        {kinds}", 80, subsequent_indent=" " * 16),
    ]
    if found["unused"]:
        lines.append(f"  not used      {', '.join(found['unused'])}")
    if found["baseline"]:
        arms = counted(found["baseline"], "arm")
        lines.append(f"{found['baseline_name']:15} {arms} to compare with")
    if found["measured"]:
        lines.append(f"metrics         {counted(found['measured'], 'item')} first")
    if found["known"]:
        lines.append(f"known           {counted(found['known'], 'evaluation')}")
    where = "checkpoints from the hub" if found["from_hub"] else "checkpoints"
    for model, count in found["checkpoints"].items():
        lines.append(f"  {model:13} {count:,} {where}")
    return [*lines, *_search_lines(found, workers)]


def _search_lines(found: dict[str, Any], workers: int | None) -> list[str]:
    at_once = found["pending"] * len(found["tasks"])
    most = "no limit on evaluations"
    if (limit := found["most_evaluations"]) is not None:
        most = f"at most {counted(limit, 'evaluation')} ({limit / found['evaluations']:.1%})"
    time = "unknown; [tasks] seconds gives the expected duration of each task"
    if found["seconds"] is not None:
        time = f"{format_duration(found['seconds'])} of one worker"
        if workers is not None:
            least = format_duration(found["seconds"] / min(workers, at_once))
            time += f", at least {least} with {workers}"
    items = counted(at_once, "item")
    lines = [
        f"search          {found['policy']}: {most}",
        f"  at once       {counted(found['pending'], 'arm')}, {items} for the workers",
        f"  time          {time}",
    ]
    if workers is not None and (idle := workers - at_once) > 0:
        fix = "raise [search] pending"
        lines.append(f"warning         {idle:,} of {workers:,} workers would be idle: {fix}")
    return lines


def run_campaign(
    campaign: Annotated[Path, Argument("CAMPAIGN.toml", "Campaign file.")],
    workers: Annotated[int | None, value("N", "Local workers. [default: one per GPU]")] = None,
    run: Annotated[str | None, value("RUN", "Run directory. [default: runs/NAME]")] = None,
    update: Annotated[bool, switch("--update", "Accept changed settings of the search.")] = False,
    fail_on_failed: Annotated[bool, switch("--fail-on-failed", FAIL_ON_FAILED)] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a campaign on this machine.

    Measures the metrics, gathers them, searches and prints a summary. Run it again to continue.

    Examples:
        hpctk campaign run campaign.toml
        hpctk campaign run campaign.toml --workers 4 --run runs/second
    """
    from hpc_toolkit.campaign.settings import read_campaign
    from hpc_toolkit.worker.code import executed
    from hpc_toolkit.worker.worker import WorkerOptions

    wanted = read_campaign(campaign)
    root = Path(run) if run is not None else Path("runs") / wanted.name
    if root.exists():
        found = Run.open(root)
        resume_campaign(found, wanted, update=update, file=str(campaign))
        executed(found.paths, found.manifest)
    else:
        found = make_campaign_run(root, wanted, str(campaign))
    count = workers if workers is not None else max(1, len(visible_gpus()))
    work = partial(work_campaign, found, count, WorkerOptions())
    try:
        code = with_progress(found, work)
    except HpcToolkitError:
        write_at_end(found)
        raise
    _print_outcome(found, as_json=as_json)
    sys.exit(exit_code(found, code, fail_on_failed=fail_on_failed))


def make_campaign_run(root: Path, campaign: Campaign, file: str = "campaign") -> Run:
    """Create the run of a campaign; the coordinator adds its items.

    ``file`` names the settings in error messages. Raises ConfigError if the search cannot work.
    """
    from hpc_toolkit.campaign.search import try_search
    from hpc_toolkit.campaign.settings import checked_stages
    from hpc_toolkit.worker.code import collect_provenance

    campaign = campaign.with_pending()
    try_search(campaign, file)
    stages = checked_stages(campaign, campaign.path)
    manifest = Manifest(
        run=root.name,
        stages=stages,
        campaign=campaign.to_json(),
        provenance=collect_provenance(stages),
    )
    return create_run(root, manifest, {}, sealed=False)


def resume_campaign(run: Run, campaign: Campaign, *, update: bool, file: str = "campaign") -> None:
    """Check that ``campaign`` equals an existing run's, or update the settings that may change.

    Keys that end the search may change until it is over, other keys of the search until its first
    decision. Raises ConfigError that names the settings that changed.
    """
    from hpc_toolkit.campaign.decisions import read_decisions
    from hpc_toolkit.campaign.search import as_decided, try_search
    from hpc_toolkit.campaign.settings import TASKS, changed_keys, settings_of
    from hpc_toolkit.campaign.tables import BUDGETS

    stage = run.view.stages[TASKS]
    stage.poll_log()
    decisions = read_decisions(stage.log.segments.values())
    known = as_decided(settings_of(run.paths, run.manifest), decisions)
    campaign = campaign.with_pending(known.search)
    changed = changed_keys(known.to_json(), campaign.to_json())
    if decisions:
        # What was read from there is in the first decision.
        changed = [key for key in changed if not key.endswith(".from")]
    if not changed:
        return
    message = f"{run.root} was created with other settings: {', '.join(changed)}"
    allowed = tuple(f"search.{key}" for key in BUDGETS) if decisions else ("search.",)
    if stage.log.sealed:
        allowed = ()
    if not all(key.startswith(allowed) for key in changed):
        listed = ", ".join(sorted(f"{key}*" if key.endswith(".") else key for key in allowed))
        hint = f"only {listed} can change now" if allowed else "the search is over"
        raise ConfigError(message, hint=f"{hint}; give --run another directory")
    if not update:
        raise ConfigError(message, hint="--update takes it over")
    if not decisions:
        try_search(campaign, file)
    replace_file(run.paths.campaign, [json.dumps(campaign.to_json(), indent=2).encode()])


def work_campaign(run: Run, workers: int, options: WorkerOptions) -> int:
    """Run workers and a coordinator until the campaign is complete; the workers' exit code.

    Raises HpcToolkitError: the coordinator failed.
    """
    coordinator = Supervisor(
        [sys.executable, "-Pm", "hpc_toolkit", "campaign", "coordinate", str(run.root)],
        # Without a coordinator, workers would wait for decisions for ever.
        lambda: signal.raise_signal(signal.SIGTERM),
        look_s=_RIVAL_S,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        start_new_session=True,
        preexec_fn=die_with_parent,
    )

    def tick() -> None:
        coordinator.poll(ranks=not coordinator.ended())

    try:
        code = run.work(workers, options, on_tick=tick)
        # Wait until the last table is published, by this coordinator or by another one.
        while code == 0 and coordinator.running:
            time.sleep(_PAUSE_S)
            coordinator.poll(ranks=False)
    finally:
        coordinator.kill()
    if failed := coordinator.ended():
        message = f"the coordinator of {run.root} ended with exit code {failed}"
        raise HpcToolkitError(message, hint="see the error above, fix it and run again")
    return code


def _print_outcome(run: Run, *, as_json: bool) -> None:
    """Write the report, and print the status without the search, and then the summary of it."""
    from hpc_toolkit.campaign.settings import settings_of
    from hpc_toolkit.campaign.summary import searched_of, summarize, summary_lines

    report = write_at_end(run)
    summary = summarize(searched_of(run.view, settings_of(run.paths, run.manifest)))
    if as_json:
        if summary is not None:
            show(asdict(summary), (), as_json=True)
        return
    lines = draw(panel(replace(run.status(), search=None)))
    show(None, [*lines, *(summary_lines(summary) if summary else ()), *report], as_json=False)


def coordinate(
    run: RunArgument = None,
    summary: Annotated[bool, switch("--summary", "Print a summary at the end.")] = False,
) -> None:
    """Run the coordinator of a campaign; it may be killed and restarted.

    Examples:
        hpctk campaign coordinate runs/my-campaign
    """
    from hpc_toolkit.campaign.coordinator import Coordinator
    from hpc_toolkit.campaign.settings import settings_of

    found = open_run(run)
    check_trust(found.root)
    Coordinator(found.view, settings_of(found.paths, found.manifest)).run()
    if summary:  # not a local campaign, whose parent writes the report
        _print_outcome(found, as_json=False)


def study(
    objective: Annotated[
        str, Argument("FILE.py:NAME", "Function of an optuna.Trial; or MODULE:NAME.")
    ],
    **given: Any,
) -> None:
    """Run trials of an Optuna objective on workers, without a database.

    Prints the run's directory. The same command again continues; 'hpctk work' and 'hpctk submit'
    send more workers. Exits with 75 if trials are left.

    Examples:
        hpctk study tune.py:objective --trials 200 --workers 8 --run runs/tune
        hpctk study tune.py:objective --trials 90 --pruner hyperband --seed 1
    """
    from hpc_toolkit.study import create
    from hpc_toolkit.worker.pool import work_elsewhere
    from hpc_toolkit.worker.worker import WorkerOptions

    named = {one.name: given.pop(one.name) for one in _STUDY["Options"]}
    workers, root = named.pop("workers"), named.pop("run")
    if named["trials"] is None:
        raise ConfigError("a number of trials is needed", hint="add --trials N")
    _, settings, _ = read_settings({"config": None, **given})
    file, _, name = objective.rpartition(":")
    path = [str(Path.cwd())]
    if file.endswith(".py"):  # as Python starts a script: its directory comes first
        path.insert(0, str(Path(file).resolve().parent))
        objective = f"{Path(file).stem}:{name}"
    root = root or Path("runs", re.sub(r"[^\w.-]+", "-", objective))
    directions = named.pop("direction").split(",")
    run = create(root, objective, **named, directions=directions, path=(*path,), **settings)
    print(run.root, flush=True)
    # Optuna has started threads, so the workers' parent is another process; it prints the end.
    if workers and (code := work_elsewhere(run.root, workers, WorkerOptions(), None)):
        sys.exit(code)
