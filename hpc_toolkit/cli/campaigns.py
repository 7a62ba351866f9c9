"""Commands of campaigns: run, status, coordinate."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hpc_toolkit.cli.arguments import (
    JsonOption,
    RunArgument,
    argument,
    open_run,
    show,
    switch,
    value,
)
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.cli.statusview import status_lines
from hpc_toolkit.cli.working import check_code, with_progress
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import check_trust
from hpc_toolkit.system.gpus import visible_gpus
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    import typer

    from hpc_toolkit.campaign.settings import Campaign
    from hpc_toolkit.campaign.summary import Found, Summary

_MEAN = "mean over tasks"
_NO_BEST = "best arm        none: no arm has a reward"


def register(app: typer.Typer) -> None:
    group = Commands(
        help="""Find the best checkpoint and layer within a budget.

        Examples:
            hpctk campaign run campaign.toml
            hpctk campaign status runs/my-campaign
        """
    )
    group.command("run")(run_campaign)
    group.command()(status)
    group.command(hidden=True)(coordinate)
    app.add_typer(group, name="campaign", rich_help_panel=SEARCH)


def run_campaign(
    campaign: Annotated[Path, argument("CAMPAIGN.toml", "Campaign file.")],
    workers: Annotated[int | None, value("N", "Local workers. [default: one per GPU]")] = None,
    run: Annotated[str | None, value("RUN", "Run directory. [default: runs/NAME]")] = None,
    update: Annotated[bool, switch("--update", "Accept changed settings of the search.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a campaign on this machine.

    Measures the metrics, gathers them, searches and prints a summary. Run it again to continue.

    Examples:
        hpctk campaign run campaign.toml
        hpctk campaign run campaign.toml --workers 4 --run runs/second
    """
    from hpc_toolkit.campaign.local import LocalWorkers, resume_campaign
    from hpc_toolkit.campaign.settings import read_campaign
    from hpc_toolkit.worker.worker import WorkerOptions

    wanted = read_campaign(campaign)
    root = Path(run) if run is not None else Path("runs") / wanted.name
    if root.exists():
        found = Run.open(root)
        resume_campaign(found, wanted, update=update, file=str(campaign))
        check_code(found, strict=False)
    else:
        found = make_run(root, campaign, wanted)
    count = workers if workers is not None else max(1, len(visible_gpus()))
    work = partial(LocalWorkers(found).work, count, WorkerOptions())
    code = with_progress(found, work)
    summary = _outcome(found)
    if not as_json:
        print("\n".join(map(printable, status_lines(found.status()))))
    if summary is not None:
        print(json.dumps(summary.to_json()) if as_json else "\n".join(summary_lines(summary)))
    sys.exit(code)


def make_run(root: Path, file: Path, campaign: Campaign) -> Run:
    """Make the run of the campaign that ``file`` describes.

    Its workloads are looked for beside the file, and then in the current directory.
    """
    from hpc_toolkit.campaign.local import make_campaign_run

    path = dict.fromkeys([str(file.absolute().parent), str(Path.cwd())])
    return make_campaign_run(root, campaign, tuple(path), str(file))


def _outcome(run: Run) -> Summary | None:
    from hpc_toolkit.campaign.local import campaign_of
    from hpc_toolkit.campaign.summary import summarize

    return summarize(run.view, campaign_of(run))


def summary_lines(summary: Summary) -> list[str]:
    spent = f"{summary.evaluations} of {summary.all_evaluations} evaluations"
    lines = [
        f"policy          {summary.policy}: {summary.evaluated} of {summary.arms} arms, {spent}"
    ]
    if summary.ended is not None:
        lines.append(f"  ended         {summary.ended}")
    if summary.scalariser != _MEAN:
        lines.append(f"  rewards       {summary.scalariser}")
    lines += _best_lines(summary, summary.best) if summary.best else [_NO_BEST]
    if summary.failed_tasks:
        lines.append(f"failed tasks    {summary.failed_tasks}, left out of the means")
        lines.append(f"  the first     {summary.failure}")
    for alike in summary.same_metrics:
        shown = ", ".join(alike[:4]) + (", ..." if len(alike) > 4 else "")
        lines.append(f"warning         equal metrics of all layers, so the same weights? {shown}")
    return lines


def _best_lines(summary: Summary, best: Found) -> list[str]:
    done, tasks = len(summary.tasks), summary.all_evaluations // summary.arms
    partly = f" over {done} of {tasks} tasks" if done < tasks else ""
    lines = [f"best arm        {_line(best)}{partly}"]
    if summary.ties:
        shown = ", ".join(summary.ties[:4]) + (", ..." if len(summary.ties) > 4 else "")
        lines.append(f"  ties          {len(summary.ties)} that noise cannot tell from it: {shown}")
    if summary.last_layer is not None:
        gain = best.score - summary.last_layer.score
        lines.append(f"best last layer {_line(summary.last_layer)}: {gain:+.4f} against it")
    if summary.exhaustive is not None:
        own = summary.verified or best
        behind = summary.exhaustive.score - own.score
        lines.append(f"exhaustive best {_line(summary.exhaustive)}: {behind:.4f} behind it")
        lines.append(f"  the search    {_standing(summary, best, summary.exhaustive)}")
    return lines


def _line(found: Found) -> str:
    spread = f" +- {found.stderr:.4f}" if found.stderr is not None else ""
    return f"{found.arm}  {found.score:.4f}{spread}"


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


def status(run: RunArgument = None, as_json: JsonOption = False) -> None:
    """Show the progress of a campaign and the best arm so far.

    Examples:
        hpctk campaign status runs/my-campaign
    """
    found = open_run(run)
    now, outcome = found.status(), _outcome(found)
    best = outcome.to_json() if outcome is not None else None
    lines = summary_lines(outcome) if outcome is not None else ["no arm has a reward yet"]
    record = {"status": now.to_json(), "summary": best}
    show(record, [*status_lines(now), *lines], as_json=as_json)


def coordinate(
    run: RunArgument = None,
    summary: Annotated[bool, switch("--summary", "Print a summary at the end.")] = False,
) -> None:
    """Run the coordinator of a campaign; it may be killed and restarted.

    Examples:
        hpctk campaign coordinate runs/my-campaign
    """
    from hpc_toolkit.campaign.coordinator import Coordinator
    from hpc_toolkit.campaign.local import campaign_of

    found = open_run(run)
    check_trust(found.root)
    Coordinator(found, campaign_of(found)).run()
    outcome = _outcome(found) if summary else None
    if outcome is not None:
        lines = [*status_lines(found.status()), *summary_lines(outcome)]
        print("\n".join(map(printable, lines)))
