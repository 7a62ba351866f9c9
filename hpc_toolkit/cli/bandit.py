"""Commands of policies: bandit bench."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import JsonOption, check_out
from hpc_toolkit.cli.help import SEARCH, Commands
from hpc_toolkit.errors import ConfigError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.bandit.bench.comparison import Entrant
    from hpc_toolkit.bandit.bench.recorded import ScoreTable

_ENDINGS = (".json", ".csv", ".svg")


def register(app: typer.Typer) -> None:
    group = Commands(
        help="""Compare search policies on recorded scores.

        Examples:
            hpctk bandit bench --table scores.csv --policies random,gp-ucb
        """
    )
    group.command()(bench)
    app.add_typer(group, name="bandit", rich_help_panel=SEARCH)


def bench(
    table: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Recorded scores (.csv, .csv.gz or .parquet), synthetic or synthetic:SEED.",
        ),
    ] = "synthetic",
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Policies, e.g. random,gp-ucb:initial=8; all compares every one."
        ),
    ] = "random,gp-ucb",
    seeds: Annotated[int, typer.Option(help="Number of searches per policy and table.")] = 10,
    subtables: Annotated[
        int, typer.Option(help="Search on N random parts of the table instead of all of it.")
    ] = 0,
    arms_share: Annotated[
        float, typer.Option(hidden=True, help="Share of the arms in each part.")
    ] = 0.5,
    tasks: Annotated[
        int | None, typer.Option(hidden=True, help="Tasks in each part. [default: all]")
    ] = None,
    asks: Annotated[
        str, typer.Option(help="Arms evaluated at once: one, rounds:N or window:N.")
    ] = "one",
    pulls: Annotated[int, typer.Option(help="Arms per search; 0 means all.")] = 60,
    until: Annotated[
        float | None, typer.Option(help="End a search at this share of the best score, e.g. 0.99.")
    ] = None,
    gpus: Annotated[str, typer.Option(metavar="N,N", help="Numbers of GPUs to simulate.")] = "1,32",
    first_seed: Annotated[int, typer.Option(hidden=True, help="First random seed.")] = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Write .json, .csv or .svg. May be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare policies by searches on recorded or synthetic scores.

    Prints how many evaluations each policy needs to find an arm with 99 % of the best score: the
    median, and the number that is enough in 9 of 10 searches. Ctrl-C keeps the policies that are
    finished.

    Examples:
        hpctk bandit bench
        hpctk bandit bench --table scores.csv --policies random,gp-ucb -o regret.svg
    """
    from hpc_toolkit.bandit.bench.comparison import Plan, entrants, reports
    from hpc_toolkit.bandit.bench.replay import Asks

    gc.enable()
    for path in out or []:
        _check_out(path, until)
    plan = Plan(
        entrants=entrants(policies),
        asks=Asks.parse(asks),
        pulls=pulls or None,
        until=until,
        seeds=seeds,
        subtables=subtables,
        share=arms_share,
        tasks=tasks,
        first=first_seed,
        gpus=_counts(gpus),
    )
    report: dict[str, Any] = {}
    try:
        for latest in reports(_read(table), plan, _progress()):
            report = latest
    finally:
        # Of an interrupted comparison, and of one that an error ends, what is finished is kept.
        if report:
            _show(report, out or [], as_json=as_json)


def _read(given: str) -> ScoreTable:
    name, _, seed = given.partition(":")
    if name == "synthetic" and (seed or "0").isdecimal():
        from hpc_toolkit.bandit.bench.synthetic import score_table

        return score_table(int(seed or "0"))
    from hpc_toolkit.results.scoretable import read_score_table

    return read_score_table(Path(given))


def _counts(given: str) -> tuple[int, ...]:
    words = [word.strip() for word in given.split(",")]
    if not all(word.isdecimal() and len(word) < 7 for word in words):
        message = f"--gpus: {given!r} is not a list of numbers"
        raise ConfigError(message, hint="write --gpus 1,32")
    return tuple(dict.fromkeys(int(word) for word in words))


def _check_out(path: Path, until: float | None) -> None:
    check_out(path, _ENDINGS)
    if path.suffix == ".svg" and until is not None:
        message = f"{path}: searches that end at a goal have no curves to draw"
        raise ConfigError(message, hint="leave out --until, or write .json or .csv")


def _show(report: dict[str, Any], out: list[Path], *, as_json: bool) -> None:
    """Print first: what cannot be written is not lost then."""
    from hpc_toolkit.bandit.bench.report import as_lines
    from hpc_toolkit.system.quantities import format_duration

    if as_json:
        print(json.dumps(report, allow_nan=False), flush=True)
    else:
        print("\n".join(as_lines(report, format_duration)), flush=True)
    if report["left_out"]:
        print(f"not finished, left out: {', '.join(report['left_out'])}", file=sys.stderr)
    for path in out:
        try:
            _write(path, report)
        except OSError as error:
            message = f"{path}: cannot be written: {error.strerror}"
            raise RunError(
                message, hint="the report is printed; run it again to write it"
            ) from error


def _write(path: Path, report: dict[str, Any]) -> None:
    from hpc_toolkit.bandit.bench.report import as_csv, regret_svg
    from hpc_toolkit.rundir.files import replace_file

    if path.suffix == ".json":
        text = json.dumps(report, allow_nan=False) + "\n"
    else:
        text = as_csv(report) if path.suffix == ".csv" else regret_svg(report)
    replace_file(path, iter([text.encode()]))


def _progress() -> Callable[[Entrant, int, int], None] | None:
    """What tells on a terminal how far the searches are; None elsewhere."""
    if not sys.stderr.isatty():
        return None

    def tell(entrant: Entrant, done: int, total: int) -> None:
        line = f"{entrant.label}: search {done + 1} of {total}"
        end = "\n" if done + 1 == total else ""
        print(f"\r{line}\x1b[K", end=end, file=sys.stderr, flush=True)

    return tell
