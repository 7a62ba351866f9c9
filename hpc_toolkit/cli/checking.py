"""What ``hpctk gather --check`` does: check a run, a snapshot or a file of results."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpc_toolkit.cli.arguments import open_run
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.run.verification import Problem, Results
    from hpc_toolkit.rundir.layout import StageSpec

_SHOWN = 20
TOLERANCE = 1e-9


class Sample(NamedTuple):
    """The options that say which results are computed again."""

    size: int
    seed: int
    tolerance: float
    ignore: list[str]


def check_results(
    results: str | None,
    *,
    items: str | None,
    ranges: list[str],
    unique: list[str],
    sample: Sample,
    as_json: bool,
) -> None:
    """Print the problems of a run, a snapshot or a file of results; exit with 1 if there are any.

    Raises:
        ConfigError: options that do not fit together, or results that cannot be read.
    """
    from hpc_toolkit.run.verification import Range, Recomputation, verify

    recompute, seed, tolerance, ignore = sample
    if not recompute and (seed or ignore or tolerance != TOLERANCE):
        message = "--seed, --tolerance and --ignore are for --recompute"
        raise ConfigError(message, hint="add --recompute 5, or leave them out")
    parsed = tuple(map(Range.parse, ranges))
    found, known, stage = _read(results)
    if items is not None:
        from hpc_toolkit.cli.runs import read_items

        known = read_items(items)
    problems = verify(found, known, ranges=parsed, unique=tuple(unique))
    again = 0
    if recompute:
        if stage is None:
            message = f"--recompute: {results} does not say which code made it"
            raise ConfigError(message, hint="check the run or a snapshot of it")
        recomputation = Recomputation(
            count=recompute, seed=seed, tolerance=tolerance, ignore=tuple(ignore)
        )
        with _stdout_on_stderr():
            again, more = recomputation.check(stage, found.rows)
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
