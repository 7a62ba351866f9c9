"""The command that says what the rest of a run would take."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_toolkit.cli.arguments import (
    JsonOption,
    RunArgument,
    check_out,
    complete_cluster,
    open_run,
    refuse_given,
    write_out,
)
from hpc_toolkit.cli.help import CHECK
from hpc_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from hpc_toolkit.planning.lengths import Guess
    from hpc_toolkit.planning.plan import Comparison, Plan
    from hpc_toolkit.planning.work import Work
    from hpc_toolkit.slurm.clusters.facts import Cluster

_ENDINGS = (".md", ".svg", ".json")
_MOST_ITEMS = 10_000_000
_MOST_NODES = 100_000
_MOST_FACTOR = 100
_EXIT_LATER = 75
_WORK, _NODE, _LIMITS = "Work", "Node", "Limits"


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=CHECK)(plan)


def plan(
    context: typer.Context,
    run: RunArgument = None,
    nodes: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of nodes to compare.")
    ] = "1,2,4,8",
    items: Annotated[
        int | None,
        typer.Option(help="Plan a new run with N items, instead of RUN.", rich_help_panel=_WORK),
    ] = None,
    groups: Annotated[
        int, typer.Option(help="Number of groups of items.", rich_help_panel=_WORK)
    ] = 1,
    item_time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Estimated time per item, if nothing has been measured.",
            rich_help_panel=_WORK,
        ),
    ] = None,
    load_time: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="Estimated time to load a group.", rich_help_panel=_WORK
        ),
    ] = "0",
    guess_factor: Annotated[
        float,
        typer.Option(
            hidden=True,
            help="Factor within which an estimate is right in 9 of 10 cases.",
            rich_help_panel=_WORK,
        ),
    ] = 1.5,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs per node. [default: the cluster's]", rich_help_panel=_NODE),
    ] = None,
    workers_per_node: Annotated[
        int | None,
        typer.Option(
            help="Workers per node. [default: one per GPU, else as many as fit]",
            rich_help_panel=_NODE,
        ),
    ] = None,
    cores_per_worker: Annotated[
        int | None, typer.Option(help="CPUs per worker.", rich_help_panel=_NODE)
    ] = None,
    memory_per_worker: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Peak memory per worker, e.g. 24G.", rich_help_panel=_NODE
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Cluster from 'hpctk cluster list', or a TOML file.",
            autocompletion=complete_cluster,
            rich_help_panel=_NODE,
        ),
    ] = None,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(
            hidden=True,
            help="Price of a GPU per hour. [default: the cluster's]",
            rich_help_panel=_NODE,
        ),
    ] = None,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Show what is done within this time, and the chance that all is.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Time limit of the longest job, e.g. 12h.",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare a plan written by -o FILE.json with the run."),
    ] = None,
    seed: Annotated[int, typer.Option(hidden=True, help="Random seed.")] = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="Write .md, .svg or .json. May be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate the time, node-hours and cost to finish a run.

    Uses the durations of finished items, or your estimates. Shows the range of 9 of 10 cases and
    the time limit to request. Time in Slurm's queue is not included.

    Examples:
        hpctk plan runs/eval --nodes 1,2,4 --cluster killarney
        hpctk plan --items 10000 --item-time 30s -o plan.json
        hpctk plan runs/eval --check plan.json
    """
    from hpc_toolkit.planning.choices import Worker, node_of
    from hpc_toolkit.planning.plan import make_plan
    from hpc_toolkit.system.quantities import parse_duration, parse_size_mib

    for path in out or []:
        check_out(path, _ENDINGS)
    if check is not None:
        refuse_given(context, {"run", "check", "as_json"}, "is not for --check")
        _compare(run, check, as_json=as_json)
        return
    if items is None:
        refuse_given(context, context.params.keys() - {"groups"}, "is for --items")
    if item_time is None:
        of_guess = {"load_time", "guess_factor"}
        refuse_given(context, context.params.keys() - of_guess, "is for --item-time")
    counts = _counts(nodes)
    _refuse_below(1, {"workers-per-node": workers_per_node, "cores-per-worker": cores_per_worker})
    _refuse_below(0, {"gpus-per-node": gpus_per_node, "seed": seed})
    _refuse_below(0, {"price-per-gpu-hour": price_per_gpu_hour})
    guess = _guess(item_time, load_time, guess_factor)
    memory = memory_per_worker
    site = _site(cluster)
    node = node_of(
        site,
        Worker(
            cores=cores_per_worker,
            mem_mib=None if memory is None else parse_size_mib(memory, where="--memory-per-worker"),
            per_node=workers_per_node,
        ),
        gpus=gpus_per_node,
        price_per_gpu_hour=price_per_gpu_hour,
    )
    found = make_plan(
        _work(run, items, groups, guess),
        guess,
        counts,
        site,
        node,
        within_s=None if within is None else parse_duration(within, where="--within"),
        limit_s=None
        if time_limit is None
        else math.ceil(parse_duration(time_limit, where="--time-limit")),
        seed=seed,
    )
    _show(found, out or [], as_json=as_json)


def _refuse_below(least: int, given: dict[str, int | None] | dict[str, float | None]) -> None:
    for option, number in given.items():
        if number is not None and not least <= number < float("inf"):
            message = f"--{option}: {number:g} is not a number from {least} on"
            raise ConfigError(message, hint=f"give {least} or more, or leave it out")


def _guess(seconds: str | None, load: str, factor: float) -> Guess | None:
    from hpc_toolkit.planning.lengths import Guess
    from hpc_toolkit.system.quantities import parse_duration

    if seconds is None:
        return None
    if not 1 <= factor <= _MOST_FACTOR:
        message = f"--guess-factor: {factor:g} is not a number from 1 to {_MOST_FACTOR}"
        raise ConfigError(message, hint="1.5 is: two thirds to one and a half times as long")
    return Guess(
        parse_duration(seconds, where="--item-time"),
        parse_duration(load, where="--load-time", zero=True),
        factor,
    )


def _counts(given: str) -> list[int]:
    words = [word.strip() for word in given.split(",")]
    numbers = [int(word) for word in words if word.isdecimal() and len(word) < 7]
    if len(numbers) < len(words) or not all(1 <= number <= _MOST_NODES for number in numbers):
        message = f"--nodes: {given!r} is not a list of numbers from 1 to {_MOST_NODES}"
        raise ConfigError(message, hint="write --nodes 1,2,4,8")
    return sorted(set(numbers))


def _site(given: str | None) -> Cluster:
    from hpc_toolkit.slurm.clusters.choice import resolve_cluster
    from hpc_toolkit.system.terminal import printable

    resolved = resolve_cluster(given)
    for note in resolved.notes:
        print(printable(note), file=sys.stderr)
    return resolved.cluster


def _work(given: str | None, items: int | None, groups: int, guess: Guess | None) -> Work:
    from hpc_toolkit.planning.reading import read_work
    from hpc_toolkit.planning.work import typed_work
    from hpc_toolkit.system.clock import SystemClock

    if items is None:
        run = open_run(given)
        campaign = run.manifest.campaign
        return read_work(run.view, SystemClock(), given=str(run.root), campaign=campaign)
    if given is not None:
        message = f"--items {items} is for a run to come, and {given} is there"
        raise ConfigError(message, hint="leave out one of the two")
    if guess is None:
        message = "--items needs --item-time: nothing is known of them"
        raise ConfigError(message, hint="give a guess, such as --item-time 30")
    if not 1 <= groups <= items <= _MOST_ITEMS:
        message = f"--items {items} --groups {groups}: not 1 to {_MOST_ITEMS} items, in groups"
        raise ConfigError(message, hint="a group has at least one item")
    return typed_work(items, groups)


def _compare(given: str | None, path: Path, *, as_json: bool) -> None:
    from hpc_toolkit.planning.plan import compare, read_plan
    from hpc_toolkit.system.clock import SystemClock

    kept = read_plan(path)
    found = compare(open_run(given or kept.run or None).view, SystemClock(), kept)
    print(json.dumps(found.to_json()) if as_json else "\n".join(_said(found)), flush=True)
    if not found.complete:
        raise typer.Exit(_EXIT_LATER)


def _said(found: Comparison) -> list[str]:
    from hpc_toolkit.planning.page import counted
    from hpc_toolkit.system.quantities import format_duration as shown

    span = f"{shown(found.low_s)} to {shown(found.high_s)}"
    on = f"on {counted(found.workers_predicted)}"
    lines = [f"predicted  {shown(found.predicted_s)} ({span}) {on}"]
    if not found.complete:
        lines.append(f"so far     {shown(found.real_s)}, {found.left:,} items left")
        lines += ["later than 19 of 20 cases"] if found.inside is False else []
        return lines
    assert found.error is not None
    inside = "inside" if found.inside else "outside"
    lines.append(f"real       {shown(found.real_s)} on {counted(found.workers)}")
    lines.append(f"off by     {found.error:+.1%} of the real time, {inside} of the interval")
    return lines


def _show(found: Plan, out: list[Path], *, as_json: bool) -> None:
    from hpc_toolkit.planning.page import as_lines, as_markdown, plan_svg

    text = json.dumps(found.to_json(), allow_nan=False)
    print(text if as_json else "\n".join(as_lines(found)), flush=True)
    for path in out:
        written = {
            ".json": lambda: text + "\n",
            ".md": lambda: as_markdown(found),
            ".svg": lambda: plan_svg(found),
        }[path.suffix]()
        write_out(path, written)
