"""Commands that write results: gather, export."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli.arguments import (
    RunArgument,
    open_run,
    refuse_given,
    show,
    switch,
    value,
    writing,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.system.options import Option, Panels, flag, many
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row, Table
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.valuefiles import Values

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
    if given["trace"]:
        why = "cannot be combined with --trace, which needs no results"
        refuse_given({"run", "out", "stage", "trace", "json"}, why)
    from hpc_toolkit.results.gather import NotCompleteError
    from hpc_toolkit.results.tables import INHERITED, writer_for

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
    rows = _with_inherited(opened, given["stage"], table)
    write_rows(outs, rows, opened.values)
    more = len(rows) - len(table)
    failed = table.failed + sum(row["state"] == "failed" for row in islice(rows, more))
    files = {"files": outs} if outs[1:] else {}
    record = {**files, "rows": len(rows), "failed": failed, "published": table.published}
    inherited = f", {more} of them inherited from {next(iter(rows))[INHERITED]}" if more else ""
    text = f"{counted(len(rows), 'row')} in {', '.join(outs)}{inherited}"
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


def _with_inherited(run: Run, stage: str | None, table: Table) -> list[Row] | Table:
    """Rows of a search, after those of the results that it started from."""
    if run.manifest.campaign is None or stage not in (None, run.manifest.stages[-1].name):
        return table
    from hpc_toolkit.campaign.decisions import with_inherited  # lists do without numpy

    return with_inherited(run.view, run.manifest, table.rows)


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
    to: Annotated[str, value("TRACKER", "mlflow or wandb.")],
    into: Annotated[str | None, value("DIR|URI", "Directory for wandb; URI for mlflow.")] = None,
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
    """
    opened = open_run(run)
    from hpc_toolkit.tracking import export as export_run

    # What trackers print on the way belongs to stderr.
    with _stdout_on_stderr():
        new, had = export_run(opened, to, into, project)
    text = f"{counted(new, 'run')} added, {had} were there"
    show({"added": new, "known": had}, [text], as_json=as_json)
