"""The command ``hpctk events``."""

from __future__ import annotations

import gc
import math
import select
import sys
import time
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

from hpc_toolkit.cli.arguments import RunArgument, open_run, switch, value
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer

    from hpc_toolkit.results.records import Submission
    from hpc_toolkit.run import Run

_POLL_S = 2.0
_EXIT_S = 60.0
"""Seconds to wait for the workers of a complete run: one that died elsewhere may seem alive."""
_JOB = ("job", "name", "cluster", "array", "script", "by", "workers", "local")


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LIST, hidden=True)(events)


def events(
    run: RunArgument = None,
    *,
    follow: Annotated[
        bool,
        switch("--follow", "Go on until the run is complete and its workers have exited.", "-f"),
    ] = False,
    since: Annotated[
        str | None,
        value("DURATION", "Leave out events that are older, or before @EPOCH or an ISO 8601 date."),
    ] = None,
) -> None:
    """Print what happened in a run as JSON lines, in the order of time.

    Every line has "at", in seconds since the epoch, and "event": claim, done, failed, release,
    death, worker-start, worker-end, add, seal, retry, gather, ask, tell, drain, notice, sick or
    job.

    Examples:
        hpctk events runs/eval
        hpctk events runs/eval --follow --since 10min | jq -c 'select(.event == "failed")'
    """
    first = float("-inf") if since is None else _since(since, time.time())
    try:
        _print(open_run(run), first, follow=follow)
    except KeyboardInterrupt:
        sys.exit(130)


def _since(text: str, now: float) -> float:
    """Epoch seconds of a moment: a duration before now, @EPOCH or a date with or without a zone."""
    from hpc_toolkit.system.quantities import parse_duration

    try:
        if text.startswith("@"):
            if math.isnan(at := float(text[1:])):
                raise ValueError(text)
            return at
        if text[:4].isdigit() and text[4:5] == "-":
            return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        message = f"--since: {text!r} is not a time: {error}"
        hint = "write 10min, @1795243470, 2026-11-25T10:00 or 2026-11-25T10:00:00+01:00"
        raise ConfigError(message, hint=hint) from error
    return now - parse_duration(text, where="--since")


def _print(run: Run, first: float, *, follow: bool) -> None:
    from hpc_toolkit.results.events import EventReader, event_line
    from hpc_toolkit.results.history import History
    from hpc_toolkit.results.sampling import pause_s

    campaign = run.manifest.campaign or {}
    search = campaign.get("search")
    policy = search.get("policy") if isinstance(search, dict) else None
    history = History(run.view, jobs=lambda: _jobs(run))
    reader = EventReader(history, policy)
    complete_at = float("inf")
    gc.enable()  # the number of events has no limit
    while True:
        for at, event in reader.poll():
            if at >= first:
                sys.stdout.write(event_line(event))
        sys.stdout.flush()
        if run.view.complete:  # its workers exit after their last item
            complete_at = min(complete_at, time.monotonic())
        over = run.view.complete and not history.alive
        if not follow or over or time.monotonic() > complete_at + _EXIT_S or _is_closed():
            return
        time.sleep(pause_s(run.view, _POLL_S))
        if not run.paths.manifest.exists():
            message = f"{run.root}: run.json is missing"
            raise RunError(message, hint="the run was removed or moved")


def _is_closed() -> bool:
    """Whether nobody reads our output any more, as after ``| head``."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in watch.poll(0))


def _jobs(run: Run) -> Iterator[Submission]:
    from hpc_toolkit.results.records import Submission
    from hpc_toolkit.submit.jobs import read_jobs

    for job in read_jobs(run.paths):
        record = asdict(job)
        facts = {key: record[key] for key in _JOB}
        name = f"{job.job} {job.submitted}"
        yield Submission(name=name, at=job.submitted or None, job=facts)
