"""Commands that keep jobs of a run in the queue, and take them back: keep, cancel."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import click

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import GivenRun, RunArgument, open_run, switch, value
from hpc_toolkit.cli.help import SLURM, Commands
from hpc_toolkit.cli.scriptoptions import ScriptCommand
from hpc_toolkit.cli.submit import from_options
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.options import Option, Panels, flag
from hpc_toolkit.system.quantities import parse_duration
from hpc_toolkit.system.terminal import note

PANELS: Panels = {
    "Options": (
        Option("jobs", "Have up to N jobs in the queue.", "N", default=1, least=1),
        flag("once", "Look once and exit, for cron."),
        Option("every", "Time between two looks. [default: 1min]", "DURATION"),
        flag("again", "Begin again after it ended, e.g. by 'hpctk cancel'."),
    ),
    **scriptoptions.PANELS,
}


def register(app: Commands) -> None:
    how: dict[str, Any] = {"arguments": {"directory": RunArgument}, "cls": ScriptCommand}
    app.add(keep, PANELS, panel=SLURM, hidden=True, **how)
    app.add(cancel, panel=SLURM)


def keep(directory: str | None, **given: Any) -> None:
    """Keep jobs in the queue while a run has work for them, and print their ids.

    It stays in the foreground, and ends when the run is complete or paused, when three submissions
    or jobs in a row failed, or by 'hpctk cancel'.

    Examples:
        hpctk keep runs/eval --jobs 4 --gpus-per-node 4 --time 1:00:00
        hpctk keep runs/eval --jobs 4 --time 1:00:00 --once
    """
    from hpc_toolkit.slurm.client import SlurmSilentError
    from hpc_toolkit.submit.keeping import COMPLETE, Keeper

    most, once, again = given.pop("jobs"), given.pop("once"), bool(given.pop("again"))
    every_s = parse_duration(given.pop("every") or "1min", where="--every")
    if given.get("array"):
        raise ConfigError("--array: arrays cannot be kept", hint="--jobs N is the number of jobs")
    given |= {"run": directory or given.get("run"), "command": None}
    submission = from_options(None, given, force=True)
    assert submission.run is not None
    for text in submission.notes:
        note(text)
    keeper = Keeper(submission, submission.run, most)
    keeper.request(again=again or not once)
    while True:
        try:
            for job in keeper.look():
                print(job, flush=True)
        except SlurmSilentError as error:
            note(f"no jobs are sent now: {error.message}", "warning")
        if keeper.ended == COMPLETE or once:
            break
        if keeper.ended:
            raise HpcToolkitError(f"no more jobs are sent: {keeper.ended}")
        time.sleep(every_s)
    if keeper.ended:
        print(f"no more jobs are sent: {keeper.ended}", file=sys.stderr)


def cancel(
    run: GivenRun,
    *,
    job: Annotated[list[str] | None, value("ID", "Cancel only this job. May be repeated.")] = None,
    yes: Annotated[bool, switch("--yes", "Do not ask for confirmation.", "-y")] = False,
) -> None:
    """Cancel the jobs of a run, and print their ids.

    RUN may be the directory of a training. Exits with 1 if the queue has no jobs of the run.

    Examples:
        hpctk cancel runs/eval
        hpctk cancel runs/eval --job 4711 --yes
    """
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.submit.keeping import end_keeping
    from hpc_toolkit.submit.send import cancel_jobs, cancelable_jobs
    from hpc_toolkit.training.progress import is_training

    paths = RunPaths(Path(run)) if is_training(Path(run)) else open_run(run).paths
    queued = cancelable_jobs(paths, only=job)
    for one in queued:
        if one.foreign:
            note(f"job {one.record.id} was not cancelled: {one.foreign}")
    found = [one for one in queued if not one.foreign]
    if not found:
        if queued or job or not end_keeping(paths):
            raise _none_queued(run, len(queued))
        return
    for record in (one.record for one in found):
        where = f" on {record.nodes}" if record.nodes else ""
        print(f"job {record.id} {record.name}: {record.state}{where}", file=sys.stderr)
    if not yes:
        if not sys.stdin.isatty():
            message = "confirmation needs a terminal"
            raise ConfigError(message, hint="add --yes to cancel without confirmation")
        click.confirm("Cancel them?", abort=True, err=True)
    if not job and end_keeping(paths):  # others may have been sent meanwhile
        found = [one for one in cancelable_jobs(paths) if not one.foreign]
    cancel_jobs(found)
    for one in found:
        print(one.record.id)


def _none_queued(run: str, left: int) -> HpcToolkitError:
    if left:
        jobs = "1 job was" if left == 1 else f"{left} jobs were"
        return HpcToolkitError(f"{jobs} left alone, see above")
    message = f"no job of {run} is in the queue"
    return HpcToolkitError(message, hint="'hpctk status RUN' lists the run's jobs")
