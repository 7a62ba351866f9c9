"""Commands that look before and after: plan, and doctor, which examines a directory."""

from __future__ import annotations

import math
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hpc_toolkit.cli import arguments
from hpc_toolkit.cli.help import CHECK, Commands
from hpc_toolkit.cli.scriptoptions import read_gpus
from hpc_toolkit.errors import ConfigError, HpcToolkitError
from hpc_toolkit.rundir.layout import all_runs
from hpc_toolkit.rundir.trust import refuse_untrusted
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.options import Option, Panels, flag
from hpc_toolkit.system.quantities import parse_counts, parse_duration
from hpc_toolkit.system.record import asdict
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.doctor.sides import Report
    from hpc_toolkit.planning.forecast import Guess, Interval
    from hpc_toolkit.planning.plan import Plan
    from hpc_toolkit.planning.work import Work
    from hpc_toolkit.results.sums import Efficiency
    from hpc_toolkit.run import Run


PANELS: Panels = {
    "Work": (
        Option("items", "Plan a new run with N items, instead of RUN.", "N", least=1, most=10**7),
        Option("item_time", "Estimated time per item, if nothing was measured.", "DURATION"),
    ),
    "Node": (
        Option("nodes", "Numbers of nodes to compare.", "N,N", default="1,2,4,8"),
        Option("gpus_per_node", "GPUs per node: 4 or l40s:4. [default: the cluster's]", "[TYPE:]N"),
        Option(
            "workers_per_node", "Workers per node. [default: one per GPU, else CPU]", "N", least=1
        ),
        Option("cluster", "Cluster, or a TOML file.", "NAME", complete=arguments.complete_cluster),
        Option("partition", "Partition of the jobs: its nodes, limits and prices.", "NAME"),
    ),
    "Output": (flag("json", "Print JSON."),),
    "Limits": (
        Option("within", "Show the chance to finish by then.", "DURATION"),
        Option("time_limit", "Time limit of the longest job, e.g. 12h.", "DURATION"),
    ),
}


def register(app: Commands) -> None:
    app.add(plan, PANELS, panel=CHECK)
    app.add(doctor, panel=CHECK)


def plan(run: arguments.RunArgument = None, **given: Any) -> None:
    """Estimate the time, node-hours and cost to finish a run.

    Uses the durations of finished items, or your estimates. Shows the range of 9 of 10 cases and
    the time limit to request. Time in Slurm's queue is not included.

    Examples:
        hpctk plan runs/eval --nodes 1,2,4 --cluster killarney
        hpctk plan --items 10000 --item-time 30s --json
    """
    from hpc_toolkit.planning.forecast import Guess
    from hpc_toolkit.planning.nodes import node_of, site_for, unmet_by
    from hpc_toolkit.planning.plan import make_plan
    from hpc_toolkit.submit import used_by

    opened = arguments.open_run(run) if given["items"] is None else None
    counts = sorted(parse_counts(given["nodes"], "--nodes", most=100_000))
    guess = None
    if given["item_time"] is not None:
        guess = Guess(parse_duration(given["item_time"], where="--item-time"))
    within, limit = given["within"], given["time_limit"]
    limit_s = math.ceil(parse_duration(limit, where="--time-limit")) if limit else None
    wanted = read_gpus(given["gpus_per_node"]) if given["gpus_per_node"] is not None else {}
    gpus, kind = wanted.get("gpus_per_node"), wanted.get("gpu_type")
    site, where = arguments.find_cluster(given["cluster"]), given["partition"]
    if where or kind:
        most = counts[-1]
        site = site_for(site, where, nodes=most, gpus=gpus, gpu_type=kind, time_s=limit_s)
    node = node_of(site, gpus=gpus, workers=given["workers_per_node"])
    used = used_by(opened.paths) if opened is not None else None
    try:
        found = make_plan(
            _read(opened) if opened is not None else _typed(run, given["items"], guess),
            guess,
            counts,
            site,
            node,
            now_s=_time_left(opened) if opened is not None else None,
            within_s=parse_duration(within, where="--within") if within else None,
            limit_s=limit_s,
        )
    except HpcToolkitError:
        if used is not None:  # of a complete run, whose jobs show what the next one needs
            note(f"used: {used.line()}")
        raise
    _show(found, used, as_json=bool(given["json"]))
    for text in unmet_by(node, limit_s, opened.view) if opened is not None else ():
        note(text, "warning")


def _time_left(run: Run) -> Interval | None:
    """The time left on the living workers, so that a plan and a status agree."""
    from hpc_toolkit.planning.forecast import Interval

    now = run.status()
    if now.eta_low_s is None or now.eta_s is None or now.eta_high_s is None:
        return None
    return Interval(now.eta_low_s, now.eta_s, now.eta_high_s)


def _read(run: Run) -> Work:
    from hpc_toolkit.planning.reading import read_work

    campaign = run.manifest.campaign
    return read_work(run.view, SystemClock(), given=str(run.root), campaign=campaign)


def _typed(given: str | None, items: int, guess: Guess | None) -> Work:
    from hpc_toolkit.planning.plan import typed_work

    if given is not None:
        message = f"--items {items} plans a new run, but {given} was named as well"
        raise ConfigError(message, hint="leave out one of them")
    if guess is None:
        message = "--items needs --item-time: no durations are known"
        raise ConfigError(message, hint="give a guess, such as --item-time 30")
    return typed_work(items)


def _show(found: Plan, used: Efficiency | None, *, as_json: bool) -> None:
    from hpc_toolkit.planning.plan import as_lines

    record, lines = found.to_json(), as_lines(found)
    if used is not None:
        record["efficiency"] = asdict(used)
        lines += [f"used so far: {used.line()}"]
    arguments.show(record, lines, as_json=as_json)


_WIDTH = 100


def doctor(
    directory: Annotated[
        str | None,
        arguments.Argument(
            "[DIR]", "Run, or a directory for runs. [default: as RUN of 'hpctk status', else .]"
        ),
    ] = None,
    pair: Annotated[str | None, arguments.value("OTHER_MOUNT", "DIR on a second mount.")] = None,
    repair: Annotated[bool, arguments.switch("--repair", "Repair the run's files.")] = False,
    as_json: arguments.JsonOption = False,
) -> None:
    """Check a filesystem, node or run for problems.

    Started by 'srun -N2 --ntasks-per-node=1', two nodes check it together; the run keeps what this
    proves about file locks. Exits with 1 if something is unsafe.

    --repair makes missing directories and claims, and nothing else. It loses no results.

    Examples:
        hpctk doctor runs/eval
        srun -N2 --ntasks-per-node=1 hpctk doctor /scratch/me/runs
        hpctk doctor runs/eval --repair
    """
    from hpc_toolkit.doctor import Step, examine, join_step
    from hpc_toolkit.doctor.sides import Verdict

    root = _directory(directory)
    if repair:
        _repair(root, pair=pair, as_json=as_json)
        return
    other = _existing(pair) if pair is not None else None
    step = None if other is not None else Step.from_environ()
    # So that what was made is removed also when Slurm or a person ends it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if step is not None and not step.leads:
        join_step(root, step)
        return
    report = examine(root, SystemClock(), other=other, step=step, around=True)
    arguments.show(report.to_json(), report_lines(report), as_json=as_json)
    sys.exit(1 if report.verdict is Verdict.UNSAFE else 0)


def _repair(root: Path, *, pair: str | None, as_json: bool) -> None:
    """Repair the files of a run, and show it. Exits with 1 if a part of it failed."""
    from hpc_toolkit.doctor.runfiles import plan_repairs, repair_run

    if pair is not None:
        raise ConfigError("--pair and --repair exclude each other", hint="leave one of them out")
    plan = plan_repairs(root)
    if plan.repairs:
        refuse_untrusted(root)
    outcomes = list(repair_run(root, plan.repairs))
    told = [{"name": name, "outcome": outcome or "done"} for name, outcome in outcomes]
    other = [f"{name}: {outcome}" for name, outcome in outcomes if outcome]
    done = f"{len(outcomes) - len(other)} of {len(outcomes)} repaired"
    words = [*(repair.words for repair in plan.repairs), *other]
    words += [f"left: {text}" for text in plan.left]
    lines = [f"{root}: {done if outcomes else 'nothing to repair'}"]
    lines += [line for text in words for line in _wrapped("  ", [text])]
    arguments.show({"run": str(root), "left": plan.left, "done": told}, lines, as_json=as_json)
    if any(outcome.startswith("failed") for _, outcome in outcomes):
        sys.exit(1)


def _directory(given: str | None) -> Path:
    if named := given or os.environ.get("HPCTK_RUN"):
        return _existing(named)
    runs = all_runs()
    return runs[0] if len(runs) == 1 else Path()


def _existing(given: str) -> Path:
    path = Path(given)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory", hint="name a run, or a directory for runs")
    return path


def report_lines(report: Report) -> Iterator[str]:
    """A report as people read it; what is fine takes one line."""
    from hpc_toolkit.doctor.sides import Verdict

    yield f"{report.directory}: {report.verdict}"
    width = max(len(finding.check) for finding in report.findings)
    for finding in report.findings:
        start = f"  {finding.verdict:<8}{finding.check:<{width}}  "
        words = [finding.found]
        if finding.verdict is not Verdict.FINE:
            words += [finding.means] if finding.means else []
            words += [f"do: {finding.fix}"] if finding.fix else []
        yield from _wrapped(start, words)


def _wrapped(start: str, words: list[str]) -> Iterator[str]:
    """Sentences below each other, the first one behind ``start``."""
    indent = " " * len(start)
    for word in words:
        yield from textwrap.wrap(
            word,
            max(_WIDTH, len(start) + 40),
            initial_indent=start,
            subsequent_indent=indent,
            break_on_hyphens=False,
        )
        start = indent
