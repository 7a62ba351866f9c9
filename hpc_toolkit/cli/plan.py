"""The command that says what the rest of a run would take."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_toolkit.cli.arguments import (
    RunArgument,
    complete_cluster,
    find_cluster,
    open_run,
    outputs,
    refuse_given,
    show,
    write_outputs,
)
from hpc_toolkit.cli.help import CHECK, Commands
from hpc_toolkit.errors import TRY_AGAIN, ConfigError, HpcToolkitError
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.options import Option, flag, many
from hpc_toolkit.system.quantities import counted, parse_counts, parse_duration, parse_size_mib
from hpc_toolkit.system.quantities import format_duration as shown
from hpc_toolkit.system.record import asdict
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.planning.forecast import Interval
    from hpc_toolkit.planning.plan import Plan
    from hpc_toolkit.planning.work import Guess, Work
    from hpc_toolkit.results.efficiency import Efficiency
    from hpc_toolkit.system.options import Panels

_MOST_ITEMS = 10_000_000
_MOST_NODES = 100_000
PANELS: Panels = {
    "Work": (
        Option("items", "Plan a new run with N items, instead of RUN.", "N"),
        Option("groups", "Number of groups of items.", "N", default=1),
        Option("item_time", "Estimated time per item, if nothing was measured.", "DURATION"),
        Option("load_time", "Estimated time to load a group.", "DURATION", default="0"),
    ),
    "Node": (
        Option("nodes", "Numbers of nodes to compare.", "N,N", default="1,2,4,8"),
        Option("gpus_per_node", "GPUs per node. [default: the cluster's]", "N", least=0),
        Option(
            "workers_per_node",
            "Workers per node. [default: one per GPU or what fits]",
            "N",
            least=1,
        ),
        Option("cores_per_worker", "CPUs per worker.", "N", least=1),
        Option("memory_per_worker", "Peak memory per worker, e.g. 24G.", "SIZE"),
        Option("cluster", "Cluster, or a TOML file.", "NAME", complete=complete_cluster),
        Option("price_per_gpu_hour", "Price of a GPU.", "NUMBER", hidden=True, least=0),
    ),
    "Output": (
        Option("check", "Compare a plan written by -o FILE.json with the run.", "FILE"),
        many("out", "Write .md, .svg or .json", "FILE")._replace(short="-o"),
        flag("json", "Print JSON."),
    ),
    "Limits": (
        Option("within", "Show how much is done by then, and the chance to finish.", "DURATION"),
        Option("time_limit", "Time limit of the longest job, e.g. 12h.", "DURATION"),
    ),
}


def register(app: Commands) -> None:
    app.add(plan, PANELS, panel=CHECK)


def plan(
    run: RunArgument = None,
    **given: Any,
) -> None:
    """Estimate the time, node-hours and cost to finish a run.

    Uses the durations of finished items, or your estimates. Shows the range of 9 of 10 cases and
    the time limit to request. Time in Slurm's queue is not included.

    Examples:
        hpctk plan runs/eval --nodes 1,2,4 --cluster killarney
        hpctk plan --items 10000 --item-time 30s -o plan.json
        hpctk plan runs/eval --check plan.json
    """
    from hpc_toolkit.planning.nodes import Worker, node_of
    from hpc_toolkit.planning.plan import make_plan
    from hpc_toolkit.planning.work import Guess
    from hpc_toolkit.submit.used import used_by

    out, as_json = outputs(given["out"], (".md", ".svg", ".json")), bool(given["json"])
    if given["check"] is not None:
        refuse_given({"run", "check", "json"}, "cannot be combined with --check")
        _compare(run, Path(given["check"]), as_json=as_json)
        return
    if given["items"] is None:
        refuse_given(click.get_current_context().params.keys() - {"groups"}, "needs --items")
    if given["item_time"] is None:
        refuse_given(click.get_current_context().params.keys() - {"load_time"}, "needs --item-time")
    counts = sorted(parse_counts(given["nodes"], "--nodes", most=_MOST_NODES))
    guess = None
    if given["item_time"] is not None:
        seconds = parse_duration(given["item_time"], where="--item-time")
        guess = Guess(seconds, parse_duration(given["load_time"], where="--load-time", zero=True))
    memory, within, limit = (given[name] for name in ("memory_per_worker", "within", "time_limit"))
    site = find_cluster(given["cluster"])
    node = node_of(
        site,
        Worker(
            cores=given["cores_per_worker"],
            mem_mib=parse_size_mib(memory, where="--memory-per-worker") if memory else None,
            per_node=given["workers_per_node"],
        ),
        gpus=given["gpus_per_node"],
        price_per_gpu_hour=given["price_per_gpu_hour"],
    )
    used = used_by(open_run(run).paths) if given["items"] is None else None
    try:
        found = make_plan(
            _work(run, given["items"], given["groups"], guess),
            guess,
            counts,
            site,
            node,
            now_s=_time_left(run) if given["items"] is None else None,
            within_s=parse_duration(within, where="--within") if within else None,
            limit_s=math.ceil(parse_duration(limit, where="--time-limit")) if limit else None,
        )
    except HpcToolkitError:
        if used is not None:  # of a complete run, whose jobs show what the next one needs
            note(f"used: {used.line()}")
        raise
    _show(found, out, used, as_json=as_json)


def _time_left(run: str | None) -> Interval | None:
    """The time left on the living workers, so that a plan and a status agree."""
    from hpc_toolkit.planning.forecast import Interval

    now = open_run(run).status()
    if now.eta_low_s is None or now.eta_s is None or now.eta_high_s is None:
        return None
    return Interval(now.eta_low_s, now.eta_s, now.eta_high_s)


def _work(given: str | None, items: int | None, groups: int, guess: Guess | None) -> Work:
    from hpc_toolkit.planning.reading import read_work
    from hpc_toolkit.planning.work import typed_work

    if items is None:
        run = open_run(given)
        campaign = run.manifest.campaign
        return read_work(run.view, SystemClock(), given=str(run.root), campaign=campaign)
    if given is not None:
        message = f"--items {items} plans a new run, but {given} was named as well"
        raise ConfigError(message, hint="leave out one of them")
    if guess is None:
        message = "--items needs --item-time: no durations are known"
        raise ConfigError(message, hint="give a guess, such as --item-time 30")
    if not 1 <= groups <= items <= _MOST_ITEMS:
        message = f"--items {items} --groups {groups}: not 1 to {_MOST_ITEMS} items, in groups"
        raise ConfigError(message, hint="a group has at least one item")
    return typed_work(items, groups)


def _compare(given: str | None, path: Path, *, as_json: bool) -> None:
    from hpc_toolkit.planning.timeleft import compare, read_plan

    kept = read_plan(path)
    found = compare(open_run(given or kept.run or None).view, SystemClock(), kept)
    show(found, _said(**found), as_json=as_json)
    if not found["complete"]:
        sys.exit(TRY_AGAIN)


def _said(*, predicted_s: float, low_s: float, high_s: float, **found: Any) -> list[str]:
    on = f"on {counted(found['workers_predicted'], 'worker')}"
    lines = [f"predicted  {shown(predicted_s)} ({shown(low_s)} to {shown(high_s)}) {on}"]
    if found["waited_s"] >= 1:
        lines.append(
            f"waited     {shown(found['waited_s'])} for the first worker, which is not counted"
        )
    real = shown(found["real_s"])
    if not found["complete"]:
        lines.append(f"so far     {real}, {counted(found['left'], 'item')} left")
        return lines + ["later than 19 of 20 cases"] * (found["inside"] is False)
    inside = "inside" if found["inside"] else "outside"
    lines.append(f"real       {real} on {counted(found['workers'], 'worker')}")
    return [*lines, f"off by     {found['error']:+.1%} of the real time, {inside} of the interval"]


def _show(found: Plan, out: list[Path], used: Efficiency | None, *, as_json: bool) -> None:
    from hpc_toolkit.planning.plan import as_lines, as_markdown, plan_svg

    record, lines = found.to_json(), as_lines(found)
    if used is not None:
        record["efficiency"] = asdict(used)
        lines += [f"used so far: {used.line()}"]
    show(record, lines, as_json=as_json)
    forms = {
        ".json": lambda: json.dumps(record, allow_nan=False) + "\n",
        ".md": lambda: as_markdown(found),
        ".svg": lambda: plan_svg(found),
    }
    write_outputs(out, forms)
