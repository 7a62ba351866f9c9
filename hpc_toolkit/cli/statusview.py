"""The command ``hpctk status``; this module imports no command line framework."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.report.panel import (
    WARN,
    Row,
    failed_items,
    headline,
    job_facts,
    job_rows,
    not_shown,
    panel,
    rate_text,
    short,
)
from hpc_toolkit.report.terminal import Look, draw
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.files import list_names
from hpc_toolkit.rundir.layout import RunPaths, all_runs, find_run, refuse_removed
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.system.options import Panels, flag
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.record import asdict
from hpc_toolkit.system.terminal import aligned, cut, printable, show_error

if TYPE_CHECKING:
    from hpc_toolkit.cli.help import Commands
    from hpc_toolkit.results.status import Presences, Status
    from hpc_toolkit.training.progress import Progress, Training

_WATCH_S = 2.0
_OUTPUT_CHARS = 160

PANELS: Panels = {
    "Options": (
        flag("json", "Print JSON."),
        flag("watch", "Follow the run until it is complete."),
        flag("check", "Exit with 1 if items have failed."),
        flag("slurm/no-slurm", "Ask Slurm for the state of the run's jobs.")._replace(default=True),
        flag("verbose", "Show the CPUs, GPUs and memory of each worker.", short="-v"),
    )
}


def register(app: Commands) -> None:
    from hpc_toolkit.cli.arguments import RunArgument
    from hpc_toolkit.cli.help import LIST

    app.add(status, PANELS, panel=LIST, arguments={"run": RunArgument})


def status(run: str | None, **given: Any) -> None:
    """Show progress, workers, failures and time left.

    RUN may be the directory of a training: this shows its jobs, last output and last checkpoint. If
    nothing is happening, the output says why. The state of jobs is unknown if Slurm does not answer
    within 5 s. Without RUN, and with several runs below ./runs, compares them, a line each.

    Examples:
        hpctk status
        hpctk status runs/eval --watch
        hpctk status --watch && notify-send 'the run has ended'
    """
    as_json, verbose, watch = bool(given["json"]), bool(given["verbose"]), bool(given["watch"])
    runs = all_runs()
    screen = False
    if watch and not as_json:
        from hpc_toolkit.cli.liveview import is_capable

        screen = is_capable(sys.stdin, sys.stdout)
    if run is None and "HPCTK_RUN" not in os.environ and len(runs) != 1 and not watch:
        troubled = _overview(runs, as_json=as_json, verbose=verbose)
    elif isinstance(opened := _opened(find_run(run)), Run):
        troubled = _of_run(opened, given, watch=watch, screen=screen)
    else:
        read = partial(opened.progress, ask=given["slurm"])
        troubled = _of_training(read, watch=watch, as_json=as_json, screen=screen)
    if given["check"] and troubled:
        sys.exit(1)


def _may_be_measured(paths: RunPaths) -> bool:
    """Whether a job ran the workers, or samples of the nodes were taken; without many imports."""
    if any(name.startswith("monitor-") for name in list_names(paths.logs)) or paths.jobs.exists():
        return True
    names = (name for name in list_names(paths.workers) if name.endswith(".json"))
    first = next((read_presence(paths.workers / name) for name in names), None)
    return first is not None and first.job is not None


def _of_run(run: Run, given: dict[str, Any], *, watch: bool, screen: bool) -> bool:
    """Show a run, with ``watch`` until it is complete; whether it has failed items."""
    from hpc_toolkit.submit import kept_jobs

    verbose, slurm = bool(given["verbose"]), given["slurm"]

    def show(now: Status, records: list[JobRecord], _seen: object = None) -> None:
        used = None
        if now.complete and (records or _may_be_measured(run.paths)):
            # Asked once, when nothing changes any more.
            from hpc_toolkit.submit import used_by

            used = used_by(run.paths, ask=slurm)
        if given["json"]:
            more = {"efficiency": asdict(used)} if used is not None else {}
            print(json.dumps({**now.to_json(), "jobs": job_facts(records), **more}), flush=True)
            return
        rows = panel(now, records, verbose=verbose)
        rows += [Row("used", used.line())] if used else []
        for _, one in kept_jobs(run.paths):
            end = f"; no more are sent: {one['ended']}" if one["ended"] else ""
            if not end and one.get("refused"):
                end = f"; Slurm refused the last one: {one['refused']}"
            rows.append(Row("keep", f"up to {one['jobs']} of {one['name']}{end}"))
        print("\n".join(draw(rows)), flush=True)

    if not screen:
        now, _ = _follow(run, show, slurm=slurm, wait=time.sleep if watch else None)
        return failed_items(now) > 0
    from hpc_toolkit.cli.liveview import full_screen
    from hpc_toolkit.report.panel import host_rows
    from hpc_toolkit.results.workers import read_hosts

    with full_screen() as view:

        def show_all(now: Status, records: list[JobRecord], seen: Presences) -> None:
            hosts = read_hosts(run.view, seen, now.alive)
            view.draw([*panel(now, records, verbose=verbose), *host_rows(hosts)])

        now, records = _follow(run, show_all, slurm=slurm, wait=view.wait)
    show(now, records)
    return failed_items(now) > 0


def _opened(root: Path) -> Run | Training:
    try:
        return Run.open(root)
    except RunError:
        # Only here, so that the status of a run imports and reads no more than it needs.
        from hpc_toolkit.training.progress import Training, is_training

        if is_training(root):
            return Training(root)
        raise


def _of_training(read: Callable[[], Progress], *, watch: bool, as_json: bool, screen: bool) -> bool:
    """Show a training, with ``watch`` until its jobs have ended; whether the last one failed."""

    def show(now: Progress) -> None:
        text = json.dumps(now.to_json()) if as_json else "\n".join(draw(training_rows(now)))
        print(text, flush=True)

    if not screen:
        return _follow_training(read, show, wait=time.sleep if watch else None).failed
    from hpc_toolkit.cli.liveview import full_screen

    with full_screen() as view:
        now = _follow_training(read, lambda now: view.draw(training_rows(now)), wait=view.wait)
    show(now)
    return now.failed


def _follow_training(
    read: Callable[[], Progress],
    show: Callable[[Progress], None],
    *,
    wait: Callable[[float], object] | None,
) -> Progress:
    """As :func:`_follow`, for a training, until its jobs have ended."""
    while True:
        now = read()
        show(now)
        if not now.goes_on or wait is None or wait(_WATCH_S):
            return now


def training_rows(now: Progress) -> list[Row]:
    state = now.jobs[-1].state if now.jobs else "no job is known"
    rows = [Row("", f"{now.directory}: {state}", is_title=True), *job_rows(now.jobs)]
    if now.rank_restarts:
        times = "once" if now.rank_restarts == 1 else f"{now.rank_restarts} times"
        rows.append(Row("restarts", f"the ranks of the latest launch were restarted {times}", WARN))
    if now.output is None:
        rows.append(Row("output", "none yet"))
    else:
        text = short(now.output.text, _OUTPUT_CHARS)
        rows.append(Row("output", f"{_ago(now.output.at)}: {text}"))
    if now.checkpoint is None:
        rows.append(Row("checkpoint", f"none in {now.directory}/checkpoints"))
    else:
        saved = now.checkpoint
        rows.append(Row("checkpoint", f"step {saved.step}, {_ago(saved.at)}: {saved.path}"))
    return rows


def _ago(at: float) -> str:
    return f"{format_duration(max(0.0, time.time() - at))} ago"


def _follow(
    run: Run,
    show: Callable[[Status, list[JobRecord], Presences], None],
    *,
    slurm: bool,
    wait: Callable[[float], object] | None,
) -> tuple[Status, list[JobRecord]]:
    """Show a run, and if there is a ``wait``, until it is complete or a wait returns true.

    ``wait`` waits for a number of seconds. Returns the last status and the run's jobs.
    """
    from hpc_toolkit.submit import JobStates
    from hpc_toolkit.submit.standstill import beside_of

    jobs = JobStates(run.paths)
    records = jobs.read(ask=slurm)
    beside = beside_of(run, lambda: records)
    seen = run.view.presences()
    now = run.status(seen=seen, beside=beside)
    while True:
        show(now, records, seen)
        if now.complete or wait is None:
            return now, records
        from hpc_toolkit.results.workers import pause_s

        gc.enable()
        if wait(pause_s(run.view, _WATCH_S)):
            return now, records
        try:
            records, seen = jobs.read(ask=slurm), run.view.presences()
            now = run.status(seen=seen, beside=beside)
        finally:  # it may have been removed while it was read
            refuse_removed(run.root)
        if now.complete and slurm and not all(job.ended for job in records):
            # They are about to end, and what Slurm said before would be the last word.
            time.sleep(_WATCH_S)
            jobs = JobStates(run.paths)
            records = jobs.read(ask=slurm)


def _overview(runs: list[Path], *, as_json: bool, verbose: bool) -> bool:
    """Print each run; whether one has failed items, or cannot be read."""
    from hpc_toolkit.system.binding import Place

    found = []
    for path in runs:
        try:
            run = Run.open(find_run(str(path)))
            is_search = run.manifest.campaign is not None  # which the forecast comes with
            found.append(run.status(forecast=is_search))
        except RunError as error:
            show_error(error)
    troubled = len(found) < len(runs) or any(map(failed_items, found))
    if as_json:
        print(json.dumps([one.to_json() for one in found]))
        return troubled
    if not runs:
        print("no runs below ./runs; create one with 'hpctk init'", file=sys.stderr)
    for one, line in zip([None, *found], _table(found), strict=True) if found else ():
        print(line)
        for worker, record in one.places.items() if one and verbose else ():
            print(printable(f"    {worker}: {Place.from_record(record)}"))
    return troubled


def _table(found: list[Status]) -> list[str]:
    """A heading and a line for each run; a column that says nothing is left out."""
    look = Look.of(sys.stdout)
    heads = ("run", "done", "failed", "workers", "speed", "best", "state", "arm")
    rows = [heads, *map(_cells, found)]
    filled = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [cut(line, look.columns) for line in aligned(zip(*filled, strict=True))]


def _cells(one: Status) -> tuple[str, ...]:
    total = sum(counts.total for counts in one.stages.values())
    done = sum(counts.done for counts in one.stages.values())
    best = one.best or {"arm": "", "reward": None}
    cells = (
        one.run,
        f"{done:,} of {total:,}",
        f"{failed_items(one):,}",
        ", ".join([f"{one.workers.alive:,}", *not_shown(one)]),
        rate_text(one.rate_per_s) if one.rate_per_s > 0 and not one.complete else "",
        f"{best['reward']:.4f}" if one.best else "",
        headline(one).removesuffix(f", {failed_items(one):,} failed"),
        best["arm"],
    )
    return tuple(map(printable, cells))
