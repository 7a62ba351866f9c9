"""The command that keeps jobs of a run in the queue: keep."""

from __future__ import annotations

import sys
import time
from typing import Any

from hpc_toolkit.cli import scriptoptions
from hpc_toolkit.cli.arguments import RunArgument
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
