"""Commands that measure how a training scales, and say what it costs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpc_toolkit.cli.arguments import (
    JsonOption,
    check_out,
    complete_cluster,
    refuse_given,
    write_out,
)
from hpc_toolkit.cli.help import TRAIN, Commands, add_table_command
from hpc_toolkit.cli.scalingrun import PANELS, run
from hpc_toolkit.cli.scriptoptions import ScriptCommand
from hpc_toolkit.errors import RunError
from hpc_toolkit.system.options import Option
from hpc_toolkit.training.scaling.collectives import DEFAULT_SIZES

if TYPE_CHECKING:
    from hpc_toolkit.training.scaling.page import Judged

_ENDINGS = (".md", ".json", ".svg")


_PRICES = (
    Option("cluster", "Cluster or TOML file with prices.", "NAME", complete=complete_cluster),
    Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", hidden=True, least=0),
    Option("min_efficiency", "Exit with 1 if a world size is less efficient.", "NUMBER", least=0),
)
_COLLECTIVES = (
    Option("world_size", "Number of ranks on this machine.", "N", default=2, least=2),
    Option("sizes", "Message sizes.", "SIZE,...", default=DEFAULT_SIZES),
    Option("collectives", "all, or e.g. all_reduce,all_gather.", "NAMES", default="all"),
    Option("iterations", "Measurements of each; the median is shown.", "N", default=20, least=1),
    Option("backend", "Backend. [default: nccl with GPUs, else gloo]", "nccl|gloo"),
)


def register(app: typer.Typer) -> None:
    group = Commands(
        help="""Measure how well training scales, and what it costs.

        Examples:
            hpctk scaling run -o scaling --world-sizes 1,2,4
            hpctk scaling analyze scaling
        """
    )
    add_table_command(group, run, PANELS, cls=ScriptCommand)
    add_table_command(group, analyze, {"Options": _PRICES})
    add_table_command(group, collectives, {"Options": _COLLECTIVES})
    app.add_typer(group, name="scaling", rich_help_panel=TRAIN)


def analyze(
    *,
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Directory of 'scaling run' or of logs, or a .json, .csv, .jsonl or .log file.",
        ),
    ],
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Write .md, .json or .svg. May be repeated."),
    ] = None,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Compare world sizes by speed, efficiency and cost.

    Also fits a scaling law and recommends a world size.

    Examples:
        hpctk scaling analyze scaling
        hpctk scaling analyze scaling --cluster killarney -o scaling.md -o scaling.svg
    """
    from hpc_toolkit.system.terminal import printable_lines
    from hpc_toolkit.training.scaling.page import as_data, as_markdown

    for path in out or []:
        check_out(path, _ENDINGS)
    min_efficiency = given.pop("min_efficiency")
    judged, notes = _judged(source, given, min_efficiency)
    if as_json:
        print(json.dumps(as_data(judged, notes), allow_nan=False))
    else:
        sys.stdout.write(printable_lines(as_markdown(judged, notes)))
    for path in out or []:
        _write(path, judged, notes)
    if min_efficiency is not None and any(verdict.below for _, verdict, _ in judged):
        raise typer.Exit(1)


def _judged(
    sources: list[Path], prices: dict[str, Any], minimum: float | None
) -> tuple[list[Judged], list[str]]:
    from hpc_toolkit.training.scaling.comparison import FAIR, compare, judge
    from hpc_toolkit.training.scaling.prices import priced
    from hpc_toolkit.training.scaling.records import read_source
    from hpc_toolkit.training.scaling.tables import check_claims

    judged: list[Judged] = []
    notes: list[str] = []
    for path in sources:
        found, left_out = read_source(path)
        notes += left_out
        for series in found:
            comparison = compare(priced(series, **prices))
            verdict = judge(comparison, FAIR if minimum is None else minimum)
            judged.append((comparison, verdict, check_claims(comparison)))
    return judged, notes


def _write(path: Path, judged: list[Judged], notes: list[str]) -> None:
    from hpc_toolkit.training.scaling.page import as_data, as_markdown
    from hpc_toolkit.training.scaling.picture import scaling_svg

    if path.suffix == ".json":
        text = json.dumps(as_data(judged, notes), allow_nan=False) + "\n"
    elif path.suffix == ".md":
        text = as_markdown(judged, notes)
    else:
        text = scaling_svg([one for one, _, _ in judged], judged[0][1].minimum)
    write_out(path, text)


def collectives(
    context: typer.Context,
    *,
    logs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[LOG]...", help="Print the measurements in these logs."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write .md or .json.")] = None,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Measure the bandwidth of collectives over message sizes.

    Bus bandwidths are computed as in nccl-tests.

    Examples:
        hpctk scaling collectives --world-size 4 --collectives all_reduce
    """
    from hpc_toolkit.training.scaling.collectives import as_markdown, records_in
    from hpc_toolkit.training.scaling.records import read_text

    if out is not None:
        check_out(out, (".md", ".json"))
    if logs:
        refuse_given(
            context, {"logs", "out", "as_json"}, "is for a measurement, and a log is there"
        )
        found = [one for path in logs for one in records_in(read_text(path))]
    else:
        found = _timed(**given)
    if not found:
        message = "no collective was timed"
        raise RunError(
            message, hint="the logs are those of hpc_toolkit.training.scaling.collectives"
        )
    data = json.dumps({"format": 1, "kind": "hpctk.collectives", "rows": found}) + "\n"
    page = as_markdown(found)
    sys.stdout.write(data if as_json else page)
    if out is not None:
        write_out(out, page if out.suffix == ".md" else data)


def _timed(
    *, world_size: int, iterations: int, sizes: str, collectives: str, backend: str | None
) -> list[dict[str, Any]]:
    import tempfile

    from hpc_toolkit.training.launch.launch import launch
    from hpc_toolkit.training.launch.plan import Request
    from hpc_toolkit.training.scaling.collectives import (
        MODULE,
        parse_collectives,
        parse_sizes,
        records_in,
    )
    from hpc_toolkit.training.scaling.records import read_text

    parse_sizes(sizes)
    parse_collectives(collectives)
    words = ("--sizes", sizes, "--collectives", collectives, "--iterations", str(iterations))
    directory = Path(tempfile.mkdtemp(prefix="hpctk-collectives-"))
    kept = False
    try:
        options = {"nproc_per_node": world_size, "module": True, "redirects": "3"}
        request = Request(
            script=MODULE, arguments=words, options=options, backend=backend, run_dir=directory
        )
        outcome = launch(request)
        if outcome.error is not None:
            kept = True  # the error names a log in it
            raise outcome.error
        outputs = sorted(directory.glob("logs/*/rank-0.*.out"))
        return [one for path in outputs for one in records_in(read_text(path))]
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)
