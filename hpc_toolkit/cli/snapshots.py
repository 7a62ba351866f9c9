"""The command that writes a snapshot of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpc_toolkit.cli.arguments import RunArgument, open_run
from hpc_toolkit.cli.help import LIST
from hpc_toolkit.errors import PASSING, ConfigError


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LIST)(snapshot)


def snapshot(
    run: RunArgument = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE.json", help="File to write; - is stdout.")
    ] = "-",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON summary of FILE.")] = False,
) -> None:
    """Write a run's items and results so far to one file.

    Workers may be running. 'hpctk init RUN --from FILE.json' creates a run from it on any machine.

    Examples:
        hpctk snapshot runs/eval -o eval.json
    """
    from hpc_toolkit.results.snapshots import write_snapshot

    if out != "-" and Path(out).suffix != ".json":
        # 'gather --check' and people would take it for something else.
        message = f"--out {out!r}: the name of a snapshot ends with .json"
        raise ConfigError(message, hint="- is stdout; 'hpctk gather' writes tables")
    taken = open_run(run).snapshot()
    if out == "-":
        sys.stdout.buffer.writelines(taken.to_lines())
        return
    try:
        write_snapshot(Path(out), taken)
    except OSError as error:
        message = f"cannot write {out}: {error.strerror}"
        failure = ConfigError(message, hint="the results are in the run; name another file")
        failure.exit_code = 75 if error.errno in PASSING else 1
        raise failure from error
    if as_json:
        print(json.dumps({"file": out, **taken.counts}))
        return
    counts = taken.counts
    print(f"{counts['done']} of {counts['items']} items are done in {out}", file=sys.stderr)
