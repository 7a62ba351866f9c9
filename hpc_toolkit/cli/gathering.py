"""The command that writes or checks results: ``hpctk gather``."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import complete_run, open_run, refuse_given
from hpc_toolkit.cli.checking import TOLERANCE, Sample, check_results
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.errors import UNREACHABLE, ConfigError

_CHECKS = "With --check"
_EXHAUSTED = {errno.ENOSPC, errno.EDQUOT}


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(rich_help_panel=LIST)(gather)


def gather(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run directory. [default: $HPCTK_RUN, else the only run below ./runs] With "
            "--check also a snapshot (.json) or a results file (.jsonl, .csv, .parquet).",
            autocompletion=complete_run,
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(
            "-o", "--out", metavar="FILE", help="Write .jsonl, .csv, .npz or .parquet; - is stdout."
        ),
    ] = "-",
    stage: Annotated[
        str | None,
        typer.Option(help="Stage of a campaign. [default: the last stage]"),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Skip unfinished items instead of exiting with an error."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: a summary of FILE, or of the check.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Write no rows. Check that each item has one row, no item failed and all numbers "
            "are finite; exit with 1 and a list of problems if not.",
        ),
    ] = False,
    range_: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=LEAST:MOST",
            help="Require a number in this range, e.g. mean=-1:1 or loss=0:. May be repeated.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    unique: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Require that no two rows have the same value of KEY. May be repeated.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    recompute: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Recompute N randomly chosen results and compare.",
            rich_help_panel=_CHECKS,
        ),
    ] = 0,
    items: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Items that a results file must have; runs and snapshots know their items.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(hidden=True, help="Random seed of --recompute.", rich_help_panel=_CHECKS),
    ] = 0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0.0,
            hidden=True,
            help="Relative difference that --recompute accepts.",
            rich_help_panel=_CHECKS,
        ),
    ] = TOLERANCE,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            hidden=True,
            help="Key that --recompute does not compare, e.g. a time. May be repeated.",
            rich_help_panel=_CHECKS,
        ),
    ] = None,
) -> None:
    """Write one row per item to a file, or check the results.

    Rows are in the order of the items, failed items included. The first complete gather publishes
    the rows; every later one writes the same rows.

    Examples:
        hpctk gather runs/eval -o results.csv
        hpctk gather runs/eval --partial -o so-far.jsonl
        hpctk gather runs/eval --check --range accuracy=0:1
        hpctk gather --check results.csv --items items.jsonl
    """
    if check:
        given = {"out": out != "-", "stage": stage is not None, "partial": partial}
        for name in filter(given.get, given):
            message = f"--{name}: --check writes no rows and checks all of them"
            raise ConfigError(message, hint=f"leave out --{name} or --check")
        check_results(
            run,
            items=items,
            ranges=range_ or [],
            unique=unique or [],
            sample=Sample(recompute, seed, tolerance, ignore or []),
            as_json=as_json,
        )
        return
    refuse_given(context, {"run", "out", "stage", "partial", "as_json"}, "is for --check")
    from hpc_toolkit.results.gather import NotCompleteError
    from hpc_toolkit.results.tables import json_lines, write_table, writer_for

    if out != "-":
        writer_for(Path(out))
    try:
        table = open_run(run).table(stage=stage, partial=partial)
    except NotCompleteError as error:
        for item in error.pending[:20]:
            print(f"pending: {json.dumps(item)}", file=sys.stderr)
        if len(error.pending) > 20:
            print(f"pending: and {len(error.pending) - 20} more", file=sys.stderr)
        raise
    if out == "-":
        sys.stdout.buffer.writelines(json_lines(table.rows))
        return
    try:
        write_table(Path(out), table.rows)
    except OSError as error:
        raise _unwritten(out, error) from error
    if as_json:
        failed = sum(row["state"] == "failed" for row in table.rows)
        rows = {"rows": len(table.rows), "failed": failed, "published": table.published}
        print(json.dumps({"file": out, **rows}))
        return
    print(f"{len(table.rows)} rows in {out}", file=sys.stderr)


def _unwritten(out: str, error: OSError) -> ConfigError:
    """Why the rows are in no file; a full disk may be emptied, a wrong name stays wrong."""
    message = f"cannot write {out}: {error.strerror}"
    if error.errno in _EXHAUSTED | UNREACHABLE | {errno.EINTR}:
        failure = ConfigError(message, hint="fix that and gather again; the results are in the run")
        failure.exit_code = 75
        return failure
    return ConfigError(message, hint="name a file in a directory that you can write to")
