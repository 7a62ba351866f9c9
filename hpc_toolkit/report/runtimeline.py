"""The timeline of a run's report, and where the time of its workers went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.report import runtables
from hpc_toolkit.report.axes import Axis, moment, number_ticks, span_ticks
from hpc_toolkit.report.charts import Part, Plot, Series, plots, shares, stepped
from hpc_toolkit.report.figures import COLOURS
from hpc_toolkit.report.gantt import STATE_COLOURS, begin_of, gantt
from hpc_toolkit.report.page import Cell, Section, Table, seconds
from hpc_toolkit.report.panel import rate_text
from hpc_toolkit.results import activity as states
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.report.figures import Figure
    from hpc_toolkit.results.activity import Activity, Timeline
    from hpc_toolkit.results.distributions import Loads

_HEIGHT = 120


def timeline(activity: Activity, loads: Loads | None) -> Section:
    """Throughput and workers on one axis of time."""
    line = activity.timeline
    shown = counted(len(line.drawn), "lane")
    said = f"{counted(activity.workers, 'worker')} in {shown}, from {moment(line.begin)}."
    deaths = activity.outcomes["deaths"]
    said += f" Recorded: {counted(deaths, 'death')} of workers or executors." if deaths else ""
    tables = (runtables.load_table(loads),) if loads is not None and loads.hosts else ()
    workers = gantt("Workers by host", said, line)._replace(
        caption=(
            "A lane shows one worker at a time, or all workers of a host if there are more than"
            " 200 lanes. It is filled by the share of each interval that its workers spent in a"
            " state; grey is the rest of their lives. Times are those of each host's clock, unless"
            " a warning says that they are corrected."
        )
    )
    return Section(
        title="Timeline",
        paragraphs=(said,),
        figures=(_throughput(activity), workers),
        tables=(*tables, *runtables.deaths(activity)),
    )


def _throughput(activity: Activity) -> Figure:
    """Items done and living workers, by interval of the timeline."""
    line = activity.timeline
    intervals = range(line.intervals)
    rates = [activity.done.get(number, 0.0) / line.width_s for number in intervals]
    alive = [
        sum(lane.lives.get(number, 0.0) for lane in line.drawn) / line.width_s
        for number in intervals
    ]
    best = max(rates)
    said = f"Up to {rate_text(best)}" if best else "No item was done"
    said += f"; living workers: up to {max(alive):.3g} (means of {format_duration(line.width_s)})."
    units = (("second", 1), ("minute", 60), ("hour", 3600))
    unit, scale = next(((unit, n) for unit, n in units if best * n >= 1), units[-1])
    time = "time since the first worker started"
    drawn = [_steps(line, "living workers", alive, COLOURS[1], below=time)]
    if best:
        done = [rate * scale for rate in rates]
        drawn.insert(0, _steps(line, f"items done per {unit}", done, COLOURS[0]))
    return plots("Throughput", said, drawn, left=begin_of(line), height=_HEIGHT)


def _steps(
    line: Timeline, name: str, values: Sequence[float], colour: str, *, below: str = ""
) -> Plot:
    """A plot of the values of a timeline's intervals; ``below`` names the axis of time."""
    span_s, high = line.end - line.begin, max(values) * 1.05 or 1.0
    columns = span_ticks(span_s)
    points = stepped([(number * line.width_s, value) for number, value in enumerate(values)])
    points.append((span_s, values[-1]))
    return Plot(
        x=below,
        y=name,
        across=Axis(0.0, span_s),
        up=Axis(0.0, high),
        columns=columns if below else [(at, "") for at, _ in columns],
        rows=number_ticks(0.0, high, 4, whole=bool(below)),
        series=[Series(name="", points=points, colour=colour, filled=True)],
    )


def spent(activity: Activity) -> Section:
    """Where the time of the workers went."""
    used = {state: took for state, took in activity.seconds.items() if took > 0}
    parts = [
        Part(state, took, format_duration(took), STATE_COLOURS[state])
        for state, took in used.items()
    ]
    said = ", ".join(f"{part.name} {part.label}" for part in parts)
    total = max(activity.lives_s, 1e-9)
    rows = [
        (state, seconds(took, total), Cell(f"{took / total:.1%}", took / total), meaning)
        for state, meaning in states.STATES.items()
        if (took := used.get(state, 0.0))
    ]
    head = ("state", "time", "share", "meaning")
    who = counted(activity.workers, "worker")
    lives = f"{who} lived {format_duration(activity.lives_s)} in total,"
    lives += " each from its start to its last sign of life. Each second is counted once."
    return Section(
        title="Where the time of the workers went",
        paragraphs=(lives,),
        figures=(shares("Worker time by state", said, [("", parts)]),),
        tables=(Table(title="", columns=head, rows=rows, fits=True),),
    )


_LEAST_S = 60.0
"""With less worker time, shares of it mean little."""
_ADVICE = {
    states.LOAD: (
        0.15,
        (
            "give each claim more items (--items-per-claim), or group them by the model"
            " that they load (--group-by)"
        ),
    ),
    states.WAIT: (
        0.15,
        (
            "the workers had too little to claim, or their jobs started slowly; in a"
            " campaign, raise 'pending'"
        ),
    ),
    states.TAIL: (0.10, "put the longest items first, make claims smaller, or use fewer workers"),
    states.FAILED: (0.05, "see the failures below; 'hpctk try --item N' runs one item here"),
    states.DUPLICATE: (
        0.01,
        (
            "workers were taken for dead while they lived, for example because"
            " their filesystem hung: see the deaths below"
        ),
    ),
}
"""The share of the worker time above which a state is reported, and the advice."""
_BUSY_PERCENT = 50.0
_LONG = 5.0


def findings(activity: Activity | None, loads: Loads | None) -> list[str]:
    """What cost the most worker time, and what to do about it, the costliest first."""
    if activity is None or activity.lives_s < _LEAST_S:
        return []
    return [*_lost(activity), *_longest(activity), *_idle_gpus(loads)]


def _lost(activity: Activity) -> Iterator[str]:
    shares = {state: activity.seconds[state] / activity.lives_s for state in _ADVICE}
    for state in sorted(shares, key=lambda one: -shares[one]):
        least, advice = _ADVICE[state]
        if shares[state] >= least:
            spent = format_duration(activity.seconds[state])
            yield f"{shares[state]:.0%} of the worker time ({spent}) went into '{state}': {advice}."


def _longest(activity: Activity) -> Iterator[str]:
    """Report an item that is long for its group: one worker runs it alone and delays the end."""
    if not activity.longest or not activity.seconds[states.TAIL]:
        return
    attempt = activity.longest[0]
    group = activity.groups.of(attempt.stage, attempt.group)
    spent, median = attempt.seconds or 0.0, group.quantile(0.5) if group is not None else 0.0
    span_s = activity.timeline.end - activity.timeline.begin
    if median and spent > _LONG * median and spent > 0.1 * span_s:
        times = f"{spent / median:.0f} times the median of its group"
        yield f"Item {attempt.item} alone took {format_duration(spent)}, {times}."


def _idle_gpus(loads: Loads | None) -> Iterator[str]:
    hosts = loads.hosts.values() if loads is not None else ()
    values = sum(host.gpu_values for host in hosts)
    if values:
        busy = sum(host.gpu for host in hosts) / values
        if busy < _BUSY_PERCENT:
            advice = "larger batches, or several workers on a GPU (--gpus-per-worker 0.5), may help"
            yield f"The GPUs were busy for {busy:.0f}% of the sampled time: {advice}."
