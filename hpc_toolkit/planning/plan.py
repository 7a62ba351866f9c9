"""The plan of the rest of a run: what numbers of nodes take in time, jobs and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_toolkit.errors import RunError
from hpc_toolkit.planning.forecast import (
    DRAWS,
    START_S,
    SURE,
    Forecast,
    Forecaster,
    Guess,
    Interval,
)
from hpc_toolkit.planning.nodes import Node, number
from hpc_toolkit.planning.work import Batch, StageWork, Work
from hpc_toolkit.queue.units import plan_units
from hpc_toolkit.slurm.clusters.facts import Cluster
from hpc_toolkit.system.quantities import (
    HOUR_S,
    MINUTE_S,
    counted,
    format_duration,
    format_walltime,
)
from hpc_toolkit.system.terminal import aligned

_MARGIN = 1.1
"""Factor from the time that is enough in 19 of 20 cases to the walltime to request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One number of nodes with its forecast and its costs."""

    nodes: int
    forecast: Forecast
    node_hours: Interval
    gpu_hours: Interval | None
    cost: Interval | None
    ask_s: int
    """The time limit to request in seconds: enough in 19 of 20 cases, or the limit of one job."""
    in_a_row: int
    """Jobs in a row that finish the work in 19 of 20 cases: 1, or more if a limit cuts it; 0: the
    limit leaves no room for an item."""


def choose(
    forecaster: Forecaster,
    node: Node,
    nodes: int,
    *,
    limit_s: int | None = None,
    within_s: float | None = None,
) -> Choice:
    """Forecast the work on a number of nodes that begin now.

    If the time limit of one job is too short, several jobs follow each other. Their number is
    enough in 19 of 20 cases.
    """
    workers = nodes * node.workers
    forecast = forecaster.forecast(workers, within_s=within_s)
    ask_s, in_a_row = _round_up(forecast.sure_s * _MARGIN + START_S), 1
    if limit_s is not None and ask_s > limit_s:
        forecast = forecaster.forecast(workers, limit_s=limit_s, within_s=within_s)
        ask_s, in_a_row = limit_s, forecast.sure_jobs
    hours = forecast.time_s.times(nodes / HOUR_S)
    price = node.price_per_hour
    return Choice(
        nodes=nodes,
        forecast=forecast,
        node_hours=hours,
        gpu_hours=hours.times(node.gpus) if node.gpus else None,
        cost=None if price is None else hours.times(price),
        ask_s=ask_s,
        in_a_row=in_a_row,
    )


def _round_up(seconds: float) -> int:
    """Round up to 5 minutes up to 2 hours, to 15 minutes up to a day, and to hours beyond."""
    step = 5 * MINUTE_S if seconds <= 2 * HOUR_S else 15 * MINUTE_S
    step = HOUR_S if seconds > 24 * HOUR_S else step
    return math.ceil(seconds / step) * step


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that ``hpctk plan`` reports.

    Fields have the meaning of those of the same name in Work, Forecaster and StageWork.
    """

    run: str
    at: float
    items: int
    done: int
    sealed: bool
    seen: int
    """Ended items from which durations were learned."""
    retried: int
    keys: list[str]
    guessed: list[str]
    item_s: Interval
    load_s: float
    longest_s: float
    largest_s: float
    useful_workers: int
    ungrouped: bool
    node: Node
    cluster: str
    now: Forecast | None
    """Forecast for the workers that are running now; None without any."""
    choices: list[Choice]
    within_s: float | None
    coming: int
    most_workers: int | None
    assumed: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def typed_work(items: int) -> Work:
    """Return the work of a list that does not exist yet."""
    batches = [Batch("", first, count) for first, count in plan_units(None, items)]
    # One object, since a list may have millions of items.
    stage = StageWork(name="items", left=({},) * items, batches=batches)
    return Work(run="", at=0.0, stages=(stage,))


def make_plan(
    work: Work,
    guess: Guess | None,
    nodes: Sequence[int],
    cluster: Cluster,
    node: Node,
    *,
    within_s: float | None = None,
    limit_s: int | None = None,
    now_s: Interval | None = None,
    draws: int = DRAWS,
) -> Plan:
    """Plan the rest of a run for several numbers of nodes, each with its own forecast.

    The guess is for stages of which no item has ended. The longest job of the cluster is the
    default of ``limit_s``, the time limit of one job. ``now_s`` is the time left on the living
    workers, as a status shows it; None: forecast it here. Raises RunError if no items are left,
    and ConfigError if nothing is known about how long items take.
    """
    if not work.left:
        message = f"{work.run}: every item has a result" if work.done else "there are no items yet"
        raise RunError(message, hint="a plan needs items without a result: 'hpctk add' adds some")
    whole = work.left
    work = _known(work, guess)
    forecaster = Forecaster(work, guess, draws=draws)
    limit_s = limit_s or cluster.max_walltime_s
    # A status gives no time either while stages are left out.
    is_known = bool(work.workers) and work.left == whole
    now = forecaster.forecast(None, within_s=within_s) if is_known else None
    if now is not None and now_s is not None:
        now = replace(now, time_s=now_s)
    learned = ("keys", "guessed", "item_s", "load_s", "longest_s", "largest_s", "useful_workers")
    facts: dict[str, Any] = {name: getattr(forecaster, name) for name in learned}
    return Plan(
        run=work.run,
        at=work.at,
        items=work.left,
        done=work.done,
        sealed=work.sealed,
        seen=sum(len(stage.seen) for stage in work.stages),
        retried=sum(stage.retried for stage in work.stages),
        **facts,
        ungrouped=any(stage.group_by is None for stage in work.stages),
        node=node,
        cluster=cluster.name,
        now=now,
        choices=[
            choose(forecaster, node, count, limit_s=limit_s, within_s=within_s) for count in nodes
        ],
        within_s=within_s,
        coming=work.coming,
        most_workers=work.most_workers,
        assumed=list(work.assumed),
    )


def _known(work: Work, guess: Guess | None) -> Work:
    """Drop stages of which no item was requested and no duration is known, and name them."""
    known = [one for one in work.stages if guess or one.seen or len(one.left) > one.coming]
    if len(known) in (0, len(work.stages)):
        return work
    without = ", ".join(stage.name for stage in work.stages if stage not in known)
    said = f"Left out, as nothing is known of how long their items take: {without}."
    return replace(work, stages=tuple(known), assumed=(said,))


def span(interval: Interval) -> str:
    return f"{format_duration(interval.low)} to {format_duration(interval.high)}"


def basis(plan: Plan) -> list[str]:
    are, have = ("is" if plan.items == 1 else "are"), ("has" if plan.done == 1 else "have")
    said = [f"{counted(plan.items, 'item')} {are} left, {plan.done:,} {have} a result."]
    if plan.coming:
        said.append(f"{plan.coming:,} of those left are to be added later.")
    said += plan.assumed
    if not plan.sealed:
        said.append("The list is open: items that come later are not in these numbers.")
    length = f"{format_duration(plan.item_s.median)} ({span(plan.item_s)})"
    if plan.guessed:
        said.append(f"An item takes {length} by your guess alone: no item has ended yet.")
    else:
        said.append(f"An item left takes {length} on average, by {plan.seen:,} that ended.")
    if plan.load_s >= 0.05:
        said.append(f"To load what a worker needs takes {format_duration(plan.load_s)}.")
    if plan.keys:
        said.append(f"Their length follows {' and '.join(plan.keys)}.")
    if plan.retried:
        failed = counted(plan.retried, "attempt")
        said.append(f"{failed} failed; the same share of later attempts is assumed to fail.")
    node = plan.node
    said.append(f"{counted(node.workers, 'worker')} on a node of {plan.cluster}: {node.why}.")
    return said


def _table_rows(plan: Plan) -> list[list[str]]:
    """Return the heads and the cells of the table, without columns of unknown values."""
    some = plan.choices[0]
    money = plan.node.currency or "price"
    head = ["nodes", "workers", "time", "9 of 10 between", "node-hours"]
    costs = {"GPU-hours": some.gpu_hours, money: some.cost}
    head += [*(name for name, cost in costs.items() if cost), "--time"]
    head += ["done by then"] if plan.within_s else []
    rows = [head]
    for one in plan.choices:
        found = one.forecast
        row = [str(one.nodes), str(found.workers), format_duration(found.time_s.median)]
        row += [span(found.time_s), number(one.node_hours.median)]
        row += [number(x.median) for x in (one.gpu_hours, one.cost) if x]
        row.append(_asked(one))
        row += [f"{found.within:.0%}"] if found.within is not None else []
        rows.append(row)
    return rows


def _asked(choice: Choice) -> str:
    text = format_walltime(choice.ask_s)
    if choice.in_a_row == 0:
        return f"{text}: too short"
    jobs = choice.forecast.jobs
    if jobs is None:
        return text
    low, high = math.floor(jobs.low), choice.in_a_row
    return f"{text}, {high if low == high else f'{low} to {high}'} in a row"


def _sentences(plan: Plan) -> list[str]:
    between = any(one.in_a_row > 1 for one in plan.choices)
    said = [f"Waiting for Slurm is in none of these times{', between jobs neither' * between}."]
    if any(one.ask_s < plan.longest_s for one in plan.choices if one.in_a_row):
        took = format_duration(plan.longest_s)
        said.append(f"In 1 of 20 cases an item is longer than {took}: no such job has room for it.")
    if plan.within_s:
        said.insert(0, f"'By then' is within {format_duration(plan.within_s)}.")
    most = plan.most_workers
    if most and plan.choices and plan.choices[-1].forecast.workers > most:
        said.append(
            f"The search has work for {counted(most, 'worker')} at once: more do not speed it up."
        )
    if plan.choices and plan.choices[-1].forecast.workers > plan.useful_workers:
        took = format_duration(plan.largest_s)
        said.append(
            f"One worker takes {took} for the largest unit, and no plan is shorter: more workers"
            f" than about {plan.useful_workers:,} help little."
        )
        if plan.ungrouped:
            said.append(
                "With 'hpctk init --items-per-claim 1', a list without groups has no larger."
            )
    return said


def advised(plan: Plan) -> list[str]:
    """Return a recommendation of what to request, if a time to be done by is given: the fewest
    node-hours that are enough in 19 of 20 cases.
    """
    if not plan.within_s or not plan.choices:
        return []
    by = f"within {format_duration(plan.within_s)}"
    able = [one for one in plan.choices if one.in_a_row and (one.forecast.within or 0.0) >= SURE]
    best = min(able, key=lambda one: (one.node_hours.median, one.nodes), default=None)
    if best is None:
        near = max(plan.choices, key=lambda one: (one.forecast.within or 0.0, one.nodes))
        chance = f"{near.forecast.within or 0.0:.0%} on {counted(near.nodes, 'node')}"
        return [f"No row is done {by} in 19 of 20 cases; the likeliest is {chance}."]
    costs = [f"{number(best.node_hours.median)} node-hours"]
    if best.gpu_hours:
        costs.append(f"{number(best.gpu_hours.median)} GPU-hours")
    if best.cost:
        costs.append(f"{plan.node.currency or 'price'} {number(best.cost.median)}")
    asked = f"{counted(best.nodes, 'node')} and --time={_asked(best)}"
    return [
        f"Request {asked}: done {by} in {best.forecast.within:.0%} of cases, {', '.join(costs)}."
    ]


def as_lines(plan: Plan) -> list[str]:
    lines = [*advised(plan), *basis(plan)]
    if plan.now is not None:
        now = plan.now
        text = f"{format_duration(now.time_s.median)} ({span(now.time_s)})"
        if now.within is not None:
            text += f"; {now.within:.0%} to be done within the limit"
        lines += ["", f"As it goes on now, on {counted(now.workers, 'worker')}: {text}"]
    if plan.choices:
        lines += ["", *aligned(_table_rows(plan)), "", *_sentences(plan)]
    return lines
