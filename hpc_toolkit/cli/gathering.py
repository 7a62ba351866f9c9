"""Commands that write or check results: gather, snapshot, export."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from hpc_toolkit.cli.arguments import (
    RunArgument,
    check_out,
    open_run,
    refuse_given,
    show,
    switch,
    value,
    writing,
)
from hpc_toolkit.cli.help import LIST, Commands
from hpc_toolkit.rundir.trust import check_trust
from hpc_toolkit.system.options import Option, Panels, flag, many
from hpc_toolkit.system.quantities import counted
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.results.tables import Row, Table
    from hpc_toolkit.results.verification import Problem
    from hpc_toolkit.run import Run
    from hpc_toolkit.rundir.valuefiles import Values

_SHOWN = 20


OUT = many("out", ".jsonl, .json, .csv, .npz or .parquet; - is stdout", "FILE")._replace(short="-o")
PANELS: Panels = {
    "Options": (
        OUT,
        Option("stage", "Stage of a campaign. [default: the last stage]"),
        flag("partial", "Skip unfinished items instead of exiting with an error."),
        flag("trace", "Write one row per attempt instead, also while workers run."),
        flag("json", "Print JSON: a summary of FILE, or of the check."),
        flag("check", "Write no rows; exit with 1 and a list of problems if there are any."),
    ),
    "With --check": (
        many("range", "Require a number in this range, e.g. mean=-1:1", "KEY=LEAST:MOST"),
        many("unique", "Require that no two rows have the same value of KEY", "KEY"),
        Option("items", "Items that a results file must have.", "FILE.jsonl"),
    ),
}


def register(app: Commands) -> None:
    app.add(gather, PANELS, panel=LIST)
    for command in (snapshot, export):
        app.add(command, panel=LIST, hidden=True)


def gather(run: RunArgument = None, **given: Any) -> None:
    """Write one row per item to a file, or check the results.

    Rows are in the order of the items, failed items included. The first complete gather publishes
    the rows; every later one writes the same rows.

    --trace writes the times, worker and outcome of every attempt.

    --check requires one row for each item, no failed item and finite numbers. It also takes a
    snapshot (.json) or rows (.jsonl, .json) instead of RUN.

    Examples:
        hpctk gather runs/eval -o results.csv
        hpctk gather runs/eval --partial -o so-far.jsonl
        hpctk gather runs/eval --trace -o trace.csv
        hpctk gather runs/eval --check --range accuracy=0:1
        hpctk gather --check results.jsonl --items items.jsonl
    """
    if given["check"]:
        why = "cannot be combined with --check, which writes no rows"
        refuse_given(
            click.get_current_context().params.keys() - {"out", "stage", "partial", "trace"}, why
        )
        check_results(run, given)
        return
    refuse_given({"run", "out", "stage", "partial", "trace", "json"}, "needs --check")
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
    from hpc_toolkit.campaign.known import with_inherited  # lists do without numpy

    return with_inherited(run.view, run.manifest, table.rows)


def _write_trace(run: Run, outs: Sequence[str], stage: str | None, *, as_json: bool) -> None:
    from hpc_toolkit.results.events import Trace

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


def check_results(results: str | None, given: dict[str, Any]) -> None:
    """Print the problems of results; exit with 1 if there are any."""
    from hpc_toolkit.results.verification import Range, verify

    ranges = tuple(map(Range.parse, given["range"]))
    rows, known, command = _read(results)
    if given["items"] is not None:
        from hpc_toolkit.cli.lists import make_items

        known = list(make_items({"items": given["items"]}, command))
    problems = verify(rows, known, ranges=ranges, unique=tuple(given["unique"]))
    _show(len(rows), known, problems, as_json=bool(given["json"]))
    if problems:
        sys.exit(1)


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


def _read(given: str | None) -> tuple[list[Row], list[Item] | None, str | None]:
    """The rows, the items and the command of a run, a snapshot or a file; None if unknown."""
    from hpc_toolkit.results.snapshots import read_rows, read_snapshot

    path = Path(given) if given is not None else None
    if path is not None and path.suffix and not path.is_dir():
        is_array = False
        with suppress(OSError), path.open("rb") as file:
            is_array = file.read(64).lstrip()[:1] == b"["  # a snapshot is an object
        if path.suffix != ".json" or is_array:
            return read_rows(path), None, None
        taken = read_snapshot(path)
    else:
        run = open_run(given)
        check_trust(run.root)
        taken = run.snapshot()
    return taken.rows, taken.items, taken.manifest.stages[0].workload.command


def _show(rows: int, items: list[Item] | None, problems: list[Problem], *, as_json: bool) -> None:
    counts = Counter(problem.kind for problem in problems)
    total = len(items) if items is not None else None
    record = {
        "complete": not problems,
        "rows": rows,
        "items": total,
        "counts": counts,
        "problems": [{"kind": one.kind, "what": one.what, "item": one.item} for one in problems],
    }
    found = counted(rows, "row") + (f" of {counted(total, 'item')}" if total is not None else "")
    what = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "complete"
    lines = [f"{found}: {what}"]
    for one in problems[:_SHOWN]:
        what = f": {one.what}" if one.what else ""
        lines.append(f"  {one.kind:<12}  {json.dumps(one.item, ensure_ascii=False)}{what}")
    if len(problems) > _SHOWN:
        lines.append(f"  and {len(problems) - _SHOWN} more; --json lists all")
    show(record, lines, as_json=as_json)


def snapshot(
    run: RunArgument = None,
    out: Annotated[str, value("FILE.json", "File to write; - is stdout.", "-o", "--out")] = "-",
    as_json: Annotated[bool, switch("--json", "Print a JSON summary of FILE.")] = False,
) -> None:
    """Write a run's items and results so far to one file.

    Workers may be running. 'hpctk init RUN --from FILE.json' creates a run from it on any machine.

    Examples:
        hpctk snapshot runs/eval -o eval.json
    """
    from hpc_toolkit.results.snapshots import write_snapshot

    if out != "-":
        check_out(Path(out), (".json",))
    taken = open_run(run).snapshot()
    if out == "-":
        sys.stdout.buffer.writelines(taken.to_lines())
        return
    with writing(out):
        write_snapshot(Path(out), taken)
    counts = taken.counts
    text = f"{counts['done']} of {counts['items']} items are done in {out}"
    _show_written([out], counts, text, as_json=as_json)


def export(
    run: RunArgument = None,
    *,
    to: Annotated[
        str,
        value("TRACKER", "mlflow, wandb, tensorboard or trackio; of a study or campaign: optuna."),
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
