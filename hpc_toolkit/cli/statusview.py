"""The command ``hpctk status``; this module imports no command line framework."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.run import Run
from hpc_toolkit.rundir.layout import all_runs, find_run
from hpc_toolkit.slurm.records import UNKNOWN
from hpc_toolkit.system.options import Option, flag
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.terminal import printable, show_error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import typer

    from hpc_toolkit.results.status import Status
    from hpc_toolkit.slurm.records import JobRecord
    from hpc_toolkit.system.options import Panels
    from hpc_toolkit.training.progress import Progress, Training

    Export = Callable[..., None]

_WATCH_S = 2.0
_EXAMPLE_CHARS = 80
_OUTPUT_CHARS = 160
_SHOWN = 8
_DAY_S = 86400
_INDENT = 11
"""Where the text of a status line begins."""


PANELS: Panels = {
    "Options": (
        flag("json", "Print JSON."),
        flag("watch", "Refresh every 2 s until the run is complete."),
        flag("check", "Exit with 1 if items have failed."),
        flag("slurm/no-slurm", "Ask Slurm for the state of the run's jobs.")._replace(default=True),
        Option(
            "prometheus",
            "Write metrics to FILE.prom for node_exporter, and print nothing.",
            "FILE.prom",
        ),
        flag("verbose", "Show the CPUs, GPUs and memory of each worker.", short="-v"),
    )
}


def register(app: typer.Typer) -> None:
    from hpc_toolkit.cli.arguments import run_argument
    from hpc_toolkit.cli.help import LIST, add_table_command

    add_table_command(app, status, PANELS, panel=LIST, arguments=[run_argument()])


def status(run: str | None, **given: Any) -> None:
    """Show progress, workers, failures and time left.

    RUN may be the directory of a training: this shows its jobs, last output and last checkpoint. If
    nothing is happening, the output says why. The state of jobs is unknown if Slurm does not answer
    within 5 s. Without RUN, and with several runs below ./runs, prints one line per run.

    Examples:
        hpctk status
        hpctk status runs/eval --watch
        hpctk status --prometheus /var/lib/node_exporter/hpctk.prom
    """

    as_json, verbose, watch = bool(given["json"]), bool(given["verbose"]), bool(given["watch"])
    runs = all_runs()
    export = None
    if given["prometheus"] is not None:
        from hpc_toolkit.cli.export import prometheus_file

        export = prometheus_file(Path(given["prometheus"]))
    if run is None and "HPCTK_RUN" not in os.environ and len(runs) != 1 and not watch:
        troubled = _overview(runs, export, as_json=as_json, verbose=verbose)
    else:
        screen = watch and not as_json and sys.stdout.isatty()
        opened = _opened(find_run(run))
        if isinstance(opened, Run):
            show = partial(_show, as_json=as_json, screen=screen, verbose=verbose)
            if export is not None:  # it has no metrics of jobs
                show, given["slurm"] = partial(_export, export), False
            troubled = _follow(opened, show, watch=watch, slurm=given["slurm"])
        elif export is not None:
            message = f"{opened.root} is the directory of a training, which has no metrics"
            raise ConfigError(message, hint="leave out --prometheus, or name a run")
        else:
            shown = partial(_show_training, as_json=as_json, screen=screen)
            troubled = _follow_training(opened, shown, watch=watch, slurm=given["slurm"])
    if given["check"] and troubled:
        sys.exit(1)


def _opened(root: Path) -> Run | Training:
    try:
        return Run.open(root)
    except RunError:
        # Only here, so that the status of a run imports and reads no more than it needs.
        from hpc_toolkit.training.progress import Training, is_training

        if is_training(root):
            return Training(root)
        raise


def _follow_training(
    training: Training, show: Callable[[Progress], None], *, watch: bool, slurm: bool
) -> bool:
    """Show a training, with ``watch`` until its jobs have ended; whether the last one failed."""
    while True:
        now = training.progress(ask=slurm)
        show(now)
        if not watch or now.ended or not now.jobs:
            return now.failed
        time.sleep(_WATCH_S)


def _show_training(now: Progress, *, as_json: bool, screen: bool) -> None:
    if as_json:
        print(json.dumps(now.to_json()), flush=True)
    else:
        _print(training_lines(now), [], screen=screen)


def training_lines(now: Progress) -> list[str]:
    """The status of a training as people read it."""
    lines = [f"{now.directory}: {now.jobs[-1].state if now.jobs else 'no job is known'}"]
    lines += job_lines(now.jobs)
    if now.rank_restarts:
        times = "once" if now.rank_restarts == 1 else f"{now.rank_restarts} times"
        lines.append(f"  restarts      the ranks of the latest launch were restarted {times}")
    if now.output is None:
        lines.append("  output        none yet")
    else:
        text = now.output.text
        text = text if len(text) <= _OUTPUT_CHARS else f"{text[: _OUTPUT_CHARS - 3]}..."
        lines.append(f"  output        {_ago(now.output.at)}: {text}")
    if now.checkpoint is None:
        lines.append(f"  checkpoint    none in {now.directory}/checkpoints")
    else:
        saved = now.checkpoint
        lines.append(f"  checkpoint    step {saved.step}, {_ago(saved.at)}: {saved.path}")
    return lines


def _ago(at: float) -> str:
    return f"{format_duration(max(0.0, time.time() - at))} ago"


def _follow(
    run: Run, show: Callable[[Status, list[JobRecord]], None], *, watch: bool, slurm: bool
) -> bool:
    """Show a run, with ``watch`` until it is complete; whether it has failed items."""
    from hpc_toolkit.rundir.proof import believed
    from hpc_toolkit.submit.jobs import JobStates

    said, jobs = believed(run.paths).said, JobStates(run.paths)
    now, records = run.status(), jobs.read(ask=slurm)
    while True:
        now.doctor, now.best = said, _best(run)
        show(now, records)
        if now.complete or not watch:
            return failed_items(now) > 0
        gc.enable()
        time.sleep(_WATCH_S)
        if not run.paths.manifest.exists():
            message = f"{run.root}: run.json is missing"
            raise RunError(message, hint="the run was removed or moved")
        now = run.status()
        if now.complete and slurm and not all(job.ended for job in records):
            # They are about to end, and what Slurm said before would be the last word.
            time.sleep(_WATCH_S)
            jobs = JobStates(run.paths)
        records = jobs.read(ask=slurm)


def _best(run: Run) -> dict[str, Any] | None:
    if run.manifest.campaign is None:
        return None
    from hpc_toolkit.campaign.local import campaign_of
    from hpc_toolkit.campaign.summary import best_so_far

    return best_so_far(run.view, campaign_of(run))


def _overview(runs: list[Path], export: Export | None, *, as_json: bool, verbose: bool) -> bool:
    """Print or export each run; whether one has failed items, or cannot be read."""

    found = []
    for path in runs:
        try:
            run = Run.open(find_run(str(path)))
            found.append(run.status())
            if export is not None:
                found[-1].best = _best(run)
        except RunError as error:
            show_error(error)
    troubled = len(found) < len(runs) or any(map(failed_items, found))
    if export is not None:
        export(*found)
        return troubled
    if as_json:
        print(json.dumps([one.to_json() for one in found]))
        return troubled
    if not runs:
        print("no runs below ./runs; create one with 'hpctk init'", file=sys.stderr)
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
    from hpc_toolkit.submit.standstill import why

    now.reason = why(now, jobs)
    if as_json:
        keys = ("id", "state", "reason", "nodes", "restarts", "start", "end")
        records = [{key: getattr(job, key) for key in keys} for job in jobs]
        print(json.dumps({**now.to_json(), "jobs": records}), flush=True)
        return
    _print(*status_parts(now, jobs, verbose=verbose), screen=screen)


def _export(export: Export, now: Status, _jobs: list[JobRecord]) -> None:
    export(now)


def _print(found: list[str], wrong: list[str], *, screen: bool) -> None:
    lines, errors = (list(map(printable, part)) for part in (found, wrong))
    if not screen:
        print("\n".join(lines + errors), flush=True)
        return
    from shutil import get_terminal_size

    columns, rows = get_terminal_size()
    shown = fit(lines, errors, columns=columns, rows=rows)
    print("\x1b[2J\x1b[H" + "\n".join(shown), flush=True)


def status_lines(now: Status) -> list[str]:
    """A run's status as people read it."""
    return [line for part in status_parts(now) for line in part]


def status_parts(
    now: Status, jobs: Sequence[JobRecord] = (), *, verbose: bool = False
) -> tuple[list[str], list[str]]:
    """The same in two parts: how it stands, then what was found wrong."""
    lines = [f"{now.run}: {_headline(now)}"]
    width = max(len(name) for name in (*now.stages, "workers"))
    for name, counts in now.stages.items():
        finished = counts.done + counts.failed
        share = f"{100 * finished / counts.total:3.0f}%" if counts.total else "  - "
        parts = [f"{counts.done} done"]
        named = ("failed", "leased", "pending", "retried", "duplicates")
        parts += [f"{getattr(counts, key)} {key}" for key in named if getattr(counts, key)]
        opened = "" if counts.sealed else "  (open for more)"
        lines.append(f"  {name:<{width}}  {share} of {counts.total}: {', '.join(parts)}{opened}")
    counted = {
        "draining": now.draining,
        "finished": now.workers.finished,
        "dead": now.workers.dead,
        "deaths seen": now.deaths,
    }
    workers = [f"{now.workers.alive} alive"]
    workers += [f"{count} {what}" for what, count in counted.items() if count]
    workers += not_shown(now)
    lines.append(f"  {'workers':<{width}}  {', '.join(workers)}")
    if now.best is not None:
        best, spread = now.best, now.best["stderr"]
        score = f"{best['score']:.4f}" + ("" if spread is None else f" +- {spread:.4f}")
        told = f"{best['evaluated']:,} of {best['arms']:,} arms"
        lines.append(f"  {'best':<{width}}  {best['arm']}  {score}  ({told})")
    lines += place_lines(now) if verbose else []
    # Of a complete run it does not matter what became of a job that Slurm has forgotten.
    lines += job_lines([job for job in jobs if not now.complete or job.state != UNKNOWN])
    if now.reason:
        lines.append(f"  {'why':<{width}}  {now.reason}")
    if now.doctor:
        lines.append(f"  {'doctor':<{width}}  {now.doctor}")
    errors = [f"  {'warning':<{width}}  {warning}" for warning in now.warnings[:5]]
    for one in now.failures:
        item = json.dumps(one["example"], ensure_ascii=False)
        item = item if len(item) <= _EXAMPLE_CHARS else f"{item[: _EXAMPLE_CHARS - 3]}..."
        errors.append(f"  {'failure':<{width}}  {one['items']} x {one['error']}: {item}")
    return lines, errors


def place_lines(now: Status) -> list[str]:
    """A line for each living worker: what it had when it began."""
    from hpc_toolkit.system.binding import Place

    return [f"    {worker}: {Place.from_record(record)}" for worker, record in now.places.items()]


def _headline(now: Status) -> str:
    if now.complete:
        failed = failed_items(now)
        return f"complete, {failed} failed" if failed else "complete"
    if now.rate_per_s > 0:
        rate = now.rate_per_s
        speed = f"{rate:.3g} items/s" if rate >= 0.1 else f"{rate * 3600:.3g} items/h"
        return f"{speed}, about {format_duration(now.eta_s or 0.0)} left"
    return "nothing moves" if now.reason else "working"


def not_shown(now: Status) -> list[str]:
    """That results are missing here which workers told of; [] if none are."""
    # What a complete run does not show are releases and duplicates.
    late = 0 if now.complete else now.old_copies
    return [f"{late} with results not shown here yet"] if late else []


def failed_items(now: Status) -> int:
    return sum(counts.failed for counts in now.stages.values())


def job_lines(jobs: Sequence[JobRecord]) -> list[str]:
    """One line for each job, oldest first; of very many the newest that have not ended.

    Jobs that are unknown for one reason share a line.
    """
    reasons = Counter(job.reason for job in jobs if job.state == UNKNOWN)
    shared = {reason: count for reason, count in reasons.items() if count > 1}
    jobs = [job for job in jobs if job.state != UNKNOWN or job.reason not in shared]
    ranked = sorted(
        range(len(jobs)), key=lambda at: (jobs[at].ended, jobs[at].state == UNKNOWN, -at)
    )
    shown = sorted(ranked[:_SHOWN])
    lines = [f"  job {jobs[at].id:<9} {_state(jobs[at])}" for at in shown]
    hidden = len(jobs) - len(shown)
    lines += [f"  jobs      and {hidden} more"] if hidden else []
    return lines + [f"  jobs      {count} {UNKNOWN} ({why})" for why, count in shared.items()]


def _state(job: JobRecord) -> str:
    """A job's state, and what follows from it; elements and restarts whatever the state."""
    state, parts = job.state, []
    if job.running:
        state += f" on {job.nodes}" if job.nodes else ""
        parts += [f"until {_clock(job.end)}"] if job.end is not None else []
    elif job.reason:
        state += f" ({job.reason})"
    if job.ended:
        parts += [f"ended {_clock(job.end)}"] if job.end is not None else []
        parts += [f"exit code {job.exit_code}"] if job.exit_code else []
    if job.waiting and job.start is not None and job.start > time.time():
        parts.append(f"starts about {_clock(job.start)}")
    if len(job.elements) > 1:
        state += ", of its elements " + ", ".join(f"{n} {name}" for name, n in job.elements)
    if job.restarts:
        parts.append(f"{job.restarts} restarts" if job.restarts > 1 else "1 restart")
    return ", ".join([state, *parts])


def _clock(at: float) -> str:
    """The time of day here, with the date if it is not near."""
    near = abs(at - time.time()) < _DAY_S / 2
    return time.strftime("%H:%M" if near else "%Y-%m-%d %H:%M", time.localtime(at))


def fit(lines: Sequence[str], errors: Sequence[str], *, columns: int, rows: int) -> list[str]:
    """The rows that fit on a terminal: ``lines`` wrapped, then one row for each of ``errors``."""
    import textwrap

    indent = " " * min(_INDENT, columns // 3)
    wrapped = [
        row
        for line in lines
        for row in textwrap.wrap(line, columns, subsequent_indent=indent, break_on_hyphens=False)
    ]
    # The last row is the cursor's.
    return [*wrapped, *(error[:columns] for error in errors)][: rows - 1]
