"""Commands that write results: gather, export, report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from hpc_toolkit.cli.arguments import (
    RunArgument,
    check_out,
    open_run,
    show,
    switch,
    value,
    write_out,
    writing,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.system.options import Option, Panels, flag, many
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.report.page import Section
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.results.sums import Range
    from hpc_toolkit.results.tables import Row
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.valuefiles import Values

T = TypeVar("T")
_FAILURES, _RESULTS = 20, 24
_READING = (
    *(OSError, HpcToolkitError, ValueError, KeyError, RecursionError),
    *(AttributeError, ArithmeticError, TypeError),
)
OUT = many("out", ".jsonl, .json, .csv or .parquet; - is stdout", "FILE")._replace(short="-o")
PANELS: Panels = {
    "Options": (
        OUT,
        Option("stage", "Stage of a campaign. [default: the last stage]"),
        flag("partial", "Skip unfinished items instead of exiting with an error."),
        flag("trace", "Write one row per attempt instead, also while workers run."),
        flag("json", "Print a JSON summary of FILE."),
    )
}


def register(app: Commands) -> None:
    app.add(gather, PANELS, panel=LIST)
    app.add(export, panel=LIST, hidden=True)
    app.add(report, panel=LIST)


def gather(run: RunArgument = None, **given: Any) -> None:
    """Write one row per item to a file.

    Rows are in the order of the items, failed items included. The first complete gather publishes
    the rows; every later one writes the same rows.

    --trace writes the times, worker and outcome of every attempt.

    Examples:
        hpctk gather runs/eval -o results.csv
        hpctk gather runs/eval --partial -o so-far.jsonl
        hpctk gather runs/eval --trace -o trace.csv
    """
    if given["trace"] and given["partial"]:
        message = "--partial cannot be combined with --trace, which needs no results"
        raise ConfigError(message, hint="leave it out")
    from hpc_toolkit.results.gather import NotCompleteError
    from hpc_toolkit.results.tables import writer_for

    outs, as_json = given["out"] or ("-",), bool(given["json"])
    for out in outs:
        if out != "-":
            writer_for(Path(out))
    opened = open_run(run)
    if given["trace"]:
        _write_trace(opened, outs, given["stage"], as_json=as_json)
        return
    try:
        table = opened.table(stage=given["stage"], partial=bool(given["partial"]))
    except NotCompleteError as error:
        for item in error.pending[:20]:
            print(f"pending: {json.dumps(item)}", file=sys.stderr)
        if len(error.pending) > 20:
            print(f"pending: and {len(error.pending) - 20} more", file=sys.stderr)
        raise
    write_rows(outs, table, opened.values)
    files = {"files": outs} if outs[1:] else {}
    record = {**files, "rows": len(table), "failed": table.failed, "published": table.published}
    text = f"{counted(len(table), 'row')} in {', '.join(outs)}"
    _show_written(outs, record, text, as_json=as_json)


def _show_written(outs: Sequence[str], record: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Say what was written to files; nothing beside rows on stdout."""
    if "-" not in outs:
        if as_json:
            print(json.dumps({"file": outs[0], **record}))
        else:
            print(text, file=sys.stderr)


def write_rows(outs: Sequence[str], rows: Iterable[Row], values: Values) -> None:
    """Write rows to files, each in the format of its suffix, and to stdout for "-"."""
    from hpc_toolkit.results.tables import json_lines, write_table

    for out in outs:
        if out == "-":
            sys.stdout.buffer.writelines(json_lines(rows))
            continue
        with writing(out):
            write_table(Path(out), rows, values)


def _write_trace(run: Run, outs: Sequence[str], stage: str | None, *, as_json: bool) -> None:
    from hpc_toolkit.results.activity import Trace

    if stage is not None:
        run.manifest.stage(stage)  # a name that is not known is refused
    rows = Trace(run.view, stage)
    write_rows(outs, rows, run.values)
    if "-" in outs:
        return
    for worker, error in run.view.unreadable.items():
        note(f"the journal of {worker} cannot be read ({error.strerror}); it is left out")
    text = f"{counted(rows.count, 'attempt')} in {', '.join(outs)}"
    _show_written(outs, {"rows": rows.count}, text, as_json=as_json)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Send what the user's code and its children print to stderr: stdout has the command's data."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def export(
    run: RunArgument = None,
    *,
    to: Annotated[
        str,
        value(
            "mlflow|wandb|tensorboard|trackio|optuna",
            "Tracker to write to; optuna: the study of a study or campaign.",
        ),
    ],
    into: Annotated[
        str | None, value("DIR|URI", "Directory to write to; or an URI for mlflow and optuna.")
    ] = None,
    project: Annotated[
        str | None, value("NAME", "Name of the project there. [default: the run's name]")
    ] = None,
    as_json: Annotated[bool, switch("--json", "Print the counts as JSON.")] = False,
) -> None:
    """Write each finished item to a tracker such as MLflow, as a run of its own.

    Items that the tracker has already are left alone: type the same command again to add what has
    finished since. Nothing is uploaded, except by MLflow to the server of its URI.

    Examples:
        hpctk export runs/eval --to mlflow --into sqlite:///mlflow.db
        hpctk export runs/eval --to wandb && wandb sync wandb/offline-run-*
        hpctk export runs/tune --to optuna --into sqlite:///study.db
    """
    opened = open_run(run)
    if to == "optuna":
        from hpc_toolkit.study import export as export_study

        export_study(opened, into or "study.log")
        show({"written": into or "study.log"}, [into or "study.log"], as_json=as_json)
        return
    from hpc_toolkit.tracking import export as export_run

    # What trackers print on the way belongs to stderr.
    with _stdout_on_stderr():
        new, had = export_run(opened, to, into, project)
    text = f"{counted(new, 'run')} added, {had} were there"
    show({"added": new, "known": had}, [text], as_json=as_json)


def report(
    run: RunArgument = None,
    *,
    out: Annotated[
        str | None, value("FILE.html", "[default: RUN/report.html]", "--out", "-o")
    ] = None,
) -> None:
    """Write a report of a run to one file, and print its path.

    The report shows what happened and what to do next: throughput, workers, lost time, durations,
    failures, jobs, settings and versions. It works while the run goes on, and needs no network.

    Examples:
        hpctk report runs/eval
        hpctk report runs/eval -o eval.html
    """
    found = open_run(run)
    path = Path(out) if out is not None else found.paths.report
    check_out(path, (".html",))
    write_out(path, report_of(found))
    print(path)


def write_at_end(run: Run) -> list[str]:
    """Write the report of a run that has ended into it; never fails.

    Returns a line that names the file; none if it could not be written.
    """
    path = run.paths.report
    try:
        write_out(path, report_of(run))
    except Exception as error:  # noqa: BLE001 - the results are complete, and matter more
        note(f"{path} was not written: {type(error).__name__}: {error}", "warning")
        return []
    return [f"report          {path}"]


def report_of(run: Run) -> str:
    """The report of a run as the text of a file."""
    from hpc_toolkit.report.page import as_html
    from hpc_toolkit.report.runreport import sections

    facts = read_facts(run)
    return as_html(f"Run {facts.status.run}", sections(facts))


def read_facts(run: Run) -> RunFacts:
    """Read what a report needs; a part that cannot be read is named in ``problems``."""
    from hpc_toolkit.report.runreport import RunFacts
    from hpc_toolkit.results.activity import Activity, read_activity
    from hpc_toolkit.results.explain import group_failures
    from hpc_toolkit.results.history import History
    from hpc_toolkit.submit import used_by
    from hpc_toolkit.system.clock import SystemClock

    problems: list[str] = []

    def read(what: str, reader: Callable[[], T], nothing: T) -> T:
        try:
            return reader()
        except _READING as error:
            problems.append(f"{what} ({type(error).__name__}: {error})")
            return nothing

    def activity() -> Activity | None:
        return read_activity(History(view), SystemClock())

    view = run.view
    try:
        status = run.status()
    except _READING:  # a forecast needs more of the run than its status
        status = run.status(forecast=False)
    made_at = time.time()
    found = read("the timeline of the workers", activity, None)
    used = read("what the jobs used", lambda: used_by(run.paths), None)
    return RunFacts(
        used=used.line() if used is not None else "",
        status=status,
        manifest=run.manifest,
        made=made_at,
        activity=found,
        failures=read(
            "the failures", lambda: group_failures(view, view.presences(), most=_FAILURES), []
        ),
        search=read("the search", lambda: _search(run), []),
        results=read("the results", lambda: _results(run), {}),
        problems=problems,
    )


def _results(run: Run) -> dict[str, Range]:
    """The numbers of a list's results; those of a search are scores, which the search compares."""
    if run.manifest.campaign is not None:
        return {}
    from hpc_toolkit.results.gather import gather as rows_of
    from hpc_toolkit.results.sums import ranges_of

    tables = (rows_of(run.view, name, partial=True, publish=False) for name in run.view.stages)
    return ranges_of(chain.from_iterable(tables), most=_RESULTS)


def _search(run: Run) -> list[Section]:
    if run.manifest.campaign is None:
        return []
    from hpc_toolkit.campaign import searchreport
    from hpc_toolkit.campaign.settings import settings_of

    return searchreport.sections(run.view, settings_of(run.paths, run.manifest))
