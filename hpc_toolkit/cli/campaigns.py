"""Commands that search: campaigns, and studies of Optuna."""

from __future__ import annotations

import re
import sys
import textwrap
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import (
    JsonOption,
    RunArgument,
    argument,
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
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.trust import check_trust
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.options import Option, Panels
from hpc_toolkit.system.quantities import counted, format_duration
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.campaign.evaluations import Found
    from hpc_toolkit.campaign.summary import Summary

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
_LONG = 30
"""Characters of the name of an arm that is too long to show several."""


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
    campaign: Annotated[Path, argument("CAMPAIGN.toml", "Campaign file.")],
    workers: Annotated[int | None, value("N", "Workers that will run, for the hours.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a campaign and show what it would do; starts and downloads nothing.

    Examples:
        hpctk campaign plan campaign.toml
        hpctk campaign plan campaign.toml --workers 32
    """
    from hpc_toolkit.campaign.coordinator import dry_run
    from hpc_toolkit.campaign.settings import read_campaign

    if workers is not None and workers < 1:
        message = f"--workers: {workers} workers"
        raise ConfigError(message, hint="give the number of ranks: one per GPU")
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
    sizes = "; 'hpctk items fetch' shows sizes"
    where = f"checkpoints from the hub{sizes}" if found["from_hub"] else "checkpoints"
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
    campaign: Annotated[Path, argument("CAMPAIGN.toml", "Campaign file.")],
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
    from hpc_toolkit.engines.localcampaign import make_campaign_run, resume_campaign, work_campaign
    from hpc_toolkit.worker.code import executed
    from hpc_toolkit.worker.worker import WorkerOptions

    wanted = read_campaign(campaign)
    root = Path(run) if run is not None else Path("runs") / wanted.name
    if root.exists():
        found = Run.open(root)
        resume_campaign(found, wanted, update=update, file=str(campaign))
        executed(found.paths, found.manifest)
    else:
        found = make_campaign_run(root, wanted, wanted.path, str(campaign))
    count = workers if workers is not None else max(1, len(visible_gpus()))
    work = partial(work_campaign, found, count, WorkerOptions())
    try:
        code = with_progress(found, work)
    except HpcToolkitError:
        write_at_end(found)
        raise
    _print_outcome(found, as_json=as_json)
    sys.exit(exit_code(found, code, fail_on_failed=fail_on_failed))


def _print_outcome(run: Run, *, as_json: bool) -> None:
    """Write the report, and print the status without the search, and then the summary of it."""
    from hpc_toolkit.campaign.settings import settings_of
    from hpc_toolkit.campaign.summary import summarize

    report = write_at_end(run)
    summary = summarize(run.view, settings_of(run.paths, run.manifest))
    if as_json:
        if summary is not None:
            show(summary.to_json(), (), as_json=True)
        return
    lines = draw(panel(replace(run.status(), search=None)))
    show(None, [*lines, *(summary_lines(summary) if summary else ()), *report], as_json=False)


def summary_lines(summary: Summary) -> list[str]:
    spent = f"{summary.evaluations:,} of {counted(summary.all_evaluations, 'evaluation')}"
    before = f" ({summary.known} known before)" if summary.known else ""
    arms = f"{summary.evaluated:,} of {counted(summary.arms, 'arm')}"
    lines = [f"policy          {summary.policy}: {arms}, {spent}{before}"]
    if summary.ended is not None:
        lines.append(f"  ended         {summary.ended}")
    none = ["best arm        none: no arm has a reward"]
    lines += _best_lines(summary, summary.best) if summary.best else none
    if summary.failed_tasks:
        lines.append(f"failed tasks    {summary.failed_tasks}, left out of the means")
        lines.append(f"  the first     {summary.failure}")
    return lines


def _best_lines(summary: Summary, best: Found) -> list[str]:
    done, tasks = len(summary.tasks), summary.all_evaluations // summary.arms
    partly = f" over {done} of {tasks} tasks" if done < tasks else ""
    lines = [f"best arm        {_line(best)}{partly}"]
    if summary.ties:
        shown = ", ".join(islice(summary.ties, 4 if len(summary.ties[0]) < _LONG else 1))
        more = ", ..." if len(summary.ties) > shown.count(", ") + 1 else ""
        count = len(summary.ties)
        lines.append(f"  ties          {count} that noise cannot tell from it: {shown}{more}")
    if summary.baseline is not None:
        gain = best.reward - summary.baseline.reward
        against = f"{_line(summary.baseline)}: {gain:+.4f} against it"
        lines.append(f"{summary.baseline_name:15} {against}")
    elif summary.baseline_name:
        lines.append(f"{summary.baseline_name:15} not evaluated")
    if summary.exhaustive is not None:
        own = summary.verified or best
        behind = summary.exhaustive.reward - own.reward
        lines.append(f"exhaustive best {_line(summary.exhaustive)}: {behind:.4f} behind it")
        lines.append(f"  the search    {_standing(summary, best, summary.exhaustive)}")
    return lines


def _line(found: Found) -> str:
    spread = f" +- {found.stderr:.4f}" if found.stderr is not None else ""
    return f"{found.arm}  {found.reward:.4f}{spread}"


def _standing(summary: Summary, best: Found, exhaustive: Found) -> str:
    if best.arm == exhaustive.arm:
        found = "found it"
    elif best.arm in summary.exhaustive_ties:
        found = "found an arm that noise cannot tell from it"
    else:
        found = "found a lesser arm"
    share = f"{summary.evaluations / summary.all_evaluations:.0%} of the evaluations"
    if summary.exhaustive_gpu_s:
        share += f" and {summary.gpu_s / summary.exhaustive_gpu_s:.0%} of their time"
    return f"{found} with {share}"


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
        str, argument("FILE.py:NAME", "Function of an optuna.Trial; or MODULE:NAME.")
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
