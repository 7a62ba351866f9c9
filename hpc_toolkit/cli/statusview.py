"""What ``hpctk status`` prints; it imports no command line framework, so that it starts quickly."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

from hpc_toolkit.cli.statuslines import failed_items, not_shown, place_lines, status_parts
from hpc_toolkit.errors import RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import find_run
from hpc_toolkit.system.terminal import printable

if TYPE_CHECKING:
    from pathlib import Path

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.slurm.records import JobRecord

_WATCH_S = 2.0


def show_status(
    run: str | None = None,
    *,
    as_json: bool = False,
    watch: bool = False,
    check: bool = False,
    slurm: bool = True,
    verbose: bool = False,
) -> None:
    """Show one run, or all below ./runs if none is named; see ``hpctk status --help``."""
    from hpc_toolkit.rundir.layout import all_runs
    from hpc_toolkit.rundir.proof import believed
    from hpc_toolkit.submit.jobs import JobStates

    runs = all_runs()
    if run is None and "HPCTK_RUN" not in os.environ and len(runs) != 1 and not watch:
        troubled = _overview(runs, as_json=as_json, verbose=verbose)
        if check and troubled:
            sys.exit(1)
        return
    found = Run.open(find_run(run))
    screen = watch and not as_json and sys.stdout.isatty()
    jobs = JobStates(found.paths)
    now, records = found.status(), jobs.read(ask=slurm)
    now.doctor = said = believed(found.paths).said
    show = partial(_show, as_json=as_json, screen=screen, verbose=verbose)
    show(now, records)
    while watch and not now.complete:
        gc.enable()
        time.sleep(_WATCH_S)
        if not found.paths.manifest.exists():
            message = f"{found.root} is a run no more: its run.json is gone"
            raise RunError(message, hint="somebody removed or moved it")
        now = found.status()
        if now.complete and slurm and not all(job.ended for job in records):
            # They are about to end, and what Slurm said before would be the last word.
            time.sleep(_WATCH_S)
            jobs = JobStates(found.paths)
        records = jobs.read(ask=slurm)
        now.doctor = said
        show(now, records)
    if check and failed_items(now):
        sys.exit(1)


def _overview(runs: list[Path], *, as_json: bool, verbose: bool) -> bool:
    """Print a line for each run; whether one has failed items, or cannot be read."""
    from hpc_toolkit.cli import show_error

    found = []
    for run in runs:
        try:
            found.append(Run.open(find_run(str(run))).status())
        except RunError as error:
            show_error(error)
    troubled = len(found) < len(runs) or any(map(failed_items, found))
    if as_json:
        print(json.dumps([one.to_json() for one in found]))
        return troubled
    if not runs:
        print("no runs below ./runs; make one with 'hpctk init'", file=sys.stderr)
    width = max((len(one.run) for one in found), default=0)
    for one in found:
        total = sum(counts.total for counts in one.stages.values())
        done = sum(counts.done for counts in one.stages.values())
        alive = [f"{one.workers.alive} workers", *not_shown(one)]
        state = "complete" if one.complete else ", ".join(alive)
        failed = f"{failed_items(one)} failed"
        print(f"{printable(one.run):<{width}}  {done}/{total} done  {failed}  {state}")
        for line in place_lines(one) if verbose else ():
            print(printable(line))
    return troubled


def _show(
    now: Status, jobs: list[JobRecord], *, as_json: bool, screen: bool, verbose: bool
) -> None:
    """Print a status; with ``screen`` in place of what the terminal shows, and no more than it."""
    from hpc_toolkit.cli.joblines import job_json
    from hpc_toolkit.submit.standstill import why

    now.reason = why(now, jobs)
    if as_json:
        print(json.dumps({**now.to_json(), "jobs": job_json(jobs)}), flush=True)
        return
    parts = status_parts(now, jobs, verbose=verbose)
    lines, errors = (list(map(printable, part)) for part in parts)
    if not screen:
        print("\n".join(lines + errors), flush=True)
        return
    from shutil import get_terminal_size

    from hpc_toolkit.cli.screen import fit

    columns, rows = get_terminal_size()
    shown = fit(lines, errors, columns=columns, rows=rows)
    print("\x1b[2J\x1b[H" + "\n".join(shown), flush=True)
