"""The command that writes a snapshot of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import RunArgument, check_out, open_run, switch, writing
from hpc_toolkit.cli.help import LIST


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LIST)(snapshot)


def snapshot(
    run: RunArgument = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE.json", help="File to write; - is stdout.")
    ] = "-",
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
    if as_json:
        print(json.dumps({"file": out, **taken.counts}))
        return
    counts = taken.counts
    print(f"{counts['done']} of {counts['items']} items are done in {out}", file=sys.stderr)
