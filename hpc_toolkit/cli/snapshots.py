"""Commands of results as files: snapshot and verify."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.cli.arguments import JsonOption, RunArgument, open_run
from hpc_toolkit.errors import PASSING, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.run.verification import Problem, Results
    from hpc_toolkit.rundir.layout import StageSpec

_SHOWN = 20
_TOLERANCE = 1e-9


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(rich_help_panel="Runs")(snapshot)
    app.command(rich_help_panel="Look")(verify)


def snapshot(
    run: RunArgument = None,
    out: Annotated[
        str, typer.Option("-o", "--out", metavar="FILE.json", help="The file, or - for stdout.")
    ] = "-",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON: what was written to FILE."),
    ] = False,
) -> None:
    """Write a run's items and results so far as one file, also while workers are at it.

    'hpctk init RUN --from FILE.json' makes a run that begins from it, on any machine.
    """
    from hpc_toolkit.run.snapshot import take_snapshot, write_snapshot

    if out != "-" and Path(out).suffix != ".json":
        # 'verify' and people would take it for something else.
        message = f"--out {out!r}: the name of a snapshot ends with .json"
        raise ConfigError(message, hint="- is stdout; 'hpctk gather' writes tables")
    taken = take_snapshot(open_run(run))
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


def verify(
    results: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|RESULTS]",
            help="A run, a snapshot (.json), or what gather wrote (.jsonl, .csv, .parquet); by "
            "default the run that other commands take.",
        ),
    ] = None,
    items: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="The items that must have one row each; a run and a snapshot know theirs.",
        ),
    ] = None,
    range_: Annotated[
        list[str] | None,
        typer.Option(
            "--range",
            metavar="KEY=LEAST:MOST",
            help="Where a number of every result must be, such as mean=-1:1 or loss=0:.",
        ),
    ] = None,
    unique: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A key of items or values that no two rows may share."),
    ] = None,
    recompute: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Compute so many results again, and compare them."),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Which ones are drawn for --recompute.")] = 0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far a recomputed number may be off, relatively.")
    ] = _TOLERANCE,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="What --recompute does not compare, such as a time."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that results are whole: one row for each item, none failed, all numbers finite.

    Exits with 1 and a list where they are not. A row that a run has not is missing.
    """
    from hpc_toolkit.run.verification import Range, Recomputation
    from hpc_toolkit.run.verification import verify as check

    if not recompute and (seed or ignore or tolerance != _TOLERANCE):
        message = "--seed, --tolerance and --ignore are for --recompute"
        raise ConfigError(message, hint="add --recompute 5, or leave them out")
    ranges = tuple(map(Range.parse, range_ or ()))
    found, known, stage = _read(results)
    if items is not None:
        from hpc_toolkit.cli.runs import read_items

        known = read_items(items)
    problems = check(found, known, ranges=ranges, unique=tuple(unique or ()))
    again = 0
    if recompute:
        if stage is None:
            message = f"--recompute: {results} does not say which code made it"
            raise ConfigError(message, hint="verify the run or a snapshot of it")
        sample = Recomputation(
            count=recompute, seed=seed, tolerance=tolerance, ignore=tuple(ignore or ())
        )
        with _stdout_on_stderr():
            again, more = sample.check(stage, found.rows)
        problems += more
    _show(found, known, problems, again, as_json=as_json)
    if problems:
        sys.exit(1)


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """What the user's code prints, and what its children do, is no data of ours."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _read(given: str | None) -> tuple[Results, list[Item] | None, StageSpec | None]:
    """The rows, the items where they are known, and the code where it is."""
    from hpc_toolkit.run.snapshot import read_snapshot, take_snapshot
    from hpc_toolkit.run.verification import Results, plain_key, read_results
    from hpc_toolkit.rundir.layout import check_trust

    path = Path(given) if given is not None else None
    if path is not None and path.suffix != ".json" and not path.is_dir() and path.suffix:
        return read_results(path), None, None
    if path is not None and path.suffix == ".json" and not path.is_dir():
        taken = read_snapshot(path)
    else:
        run = open_run(given)
        check_trust(run.root)
        taken = take_snapshot(run)
    return Results(rows=taken.rows, key=plain_key), taken.items, taken.manifest.stages[0]


def _show(
    found: Results,
    items: list[Item] | None,
    problems: list[Problem],
    again: int,
    *,
    as_json: bool,
) -> None:
    from collections import Counter

    from hpc_toolkit.system.terminal import printable

    counts = Counter(problem.kind for problem in problems)
    total = len(items) if items is not None else None
    if as_json:
        record = {
            "whole": not problems,
            "rows": len(found.rows),
            "items": total,
            "recomputed": again,
            "counts": counts,
            "problems": [
                {"kind": one.kind, "what": one.what, "item": one.item} for one in problems
            ],
        }
        print(json.dumps(record))
        return
    rows = f"{len(found.rows)} rows" + (f" of {total} items" if total is not None else "")
    what = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "whole"
    print(f"{rows}, {again} computed again: {what}")
    for one in problems[:_SHOWN]:
        what = f": {one.what}" if one.what else ""
        print(printable(f"  {one.kind:<12}  {json.dumps(one.item, ensure_ascii=False)}{what}"))
    if len(problems) > _SHOWN:
        print(f"  and {len(problems) - _SHOWN} more; --json lists all")
