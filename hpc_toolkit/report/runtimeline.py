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
    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.lanes import Timeline
    from hpc_toolkit.results.loads import Loads

_HEIGHT = 120


def timeline(found: Activity, loads: Loads | None) -> Section:
    """Throughput and workers on one axis of time."""
    line = found.timeline
    shown = counted(len(line.drawn), "lane")
    said = f"{counted(found.workers, 'worker')} in {shown}, from {moment(line.begin)}."
    deaths = found.outcomes["deaths"]
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
        figures=(_throughput(found), workers),
        tables=(*tables, *runtables.deaths(found)),
    )


def _throughput(found: Activity) -> Figure:
    """Items done and living workers, by interval of the timeline."""
    line = found.timeline
    rates = [found.done.get(one, 0.0) / line.width_s for one in range(line.intervals)]
    alive = [
        sum(lane.lives.get(one, 0.0) for lane in line.drawn) / line.width_s
        for one in range(line.intervals)
    ]
    best = max(rates)
    said = f"Up to {rate_text(best)}" if best else "No item was done"
    said += f"; living workers: up to {max(alive):.3g} (means of {format_duration(line.width_s)})."
    units = (("second", 1), ("minute", 60), ("hour", 3600))
    unit, scale = next((one for one in units if best * one[1] >= 1), units[-1])
    drawn = [
        _steps(line, f"items done per {unit}", [one * scale for one in rates], COLOURS[0]),
        _steps(
            line, "living workers", alive, COLOURS[1], below="time since the first worker started"
        ),
    ]
    shown = drawn if best else drawn[1:]
    return plots("Throughput", said, shown, left=begin_of(line), height=_HEIGHT)


def _steps(
    line: Timeline, name: str, values: Sequence[float], colour: str, *, below: str = ""
) -> Plot:
    """The values of the intervals of a timeline; ``below`` names the axis of time."""
    span_s, high = line.end - line.begin, max(values) * 1.05 or 1.0
    columns = span_ticks(span_s)
    points = stepped([(one * line.width_s, value) for one, value in enumerate(values)])
    return Plot(
        x=below,
        y=name,
        across=Axis(0.0, span_s),
        up=Axis(0.0, high),
        columns=columns if below else [(at, "") for at, _ in columns],
        rows=number_ticks(0.0, high, 4, whole=bool(below)),
        series=[
            Series(name="", points=[*points, (span_s, values[-1])], colour=colour, filled=True)
        ],
    )


def spent(found: Activity) -> Section:
    """Where the time of the workers went."""
    used = {state: took for state, took in found.seconds.items() if took > 0}
    parts = [
        Part(one, took, format_duration(took), STATE_COLOURS[one]) for one, took in used.items()
    ]
    said = ", ".join(f"{part.name} {part.label}" for part in parts)
    total = max(found.lives_s, 1e-9)
    rows = [
        (
            one,
            seconds(took, total),
            Cell(f"{took / total:.1%}", took / total),
            states.STATES[one],
        )
        for one, took in used.items()
    ]
    name = "Where the time of the workers went"
    who = counted(found.workers, "worker")
    lives = f"{who} lived {format_duration(found.lives_s)} in total,"
    lives += " each from its start to its last sign of life. Each second is counted once."
    return Section(
        title=name,
        paragraphs=(lives,),
        figures=(shares("Worker time by state", said, [("", parts)]),),
        tables=(
            Table(title="", columns=("state", "time", "share", "meaning"), rows=rows, fits=True),
        ),
    )


_LEAST_S = 60.0
"""Worker time below which shares say little."""
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
"""From which share of the worker time on a state is worth a word, and which."""
_BUSY_PERCENT = 50.0
_LONG = 5.0


def findings(found: Activity | None, loads: Loads | None) -> list[str]:
    """Sentences with numbers, the costliest first."""
    if found is None or found.lives_s < _LEAST_S:
        return []
    return [*_lost(found), *_longest(found), *_idle_gpus(loads)]


def _lost(found: Activity) -> Iterator[str]:
    shares = {state: found.seconds[state] / found.lives_s for state in _ADVICE}
    for state in sorted(shares, key=lambda one: -shares[one]):
        least, advice = _ADVICE[state]
        if shares[state] >= least:
            spent = format_duration(found.seconds[state])
            yield f"{shares[state]:.0%} of the worker time ({spent}) went into '{state}': {advice}."


def _longest(found: Activity) -> Iterator[str]:
    """An item that is long for its group delays the end, because one worker runs it alone."""
    if not found.longest or not found.seconds[states.TAIL]:
        return
    one = found.longest[0]
    group = found.groups.of(one.stage, one.group)
    spent, median = one.seconds or 0.0, group.quantile(0.5) if group is not None else 0.0
    span_s = found.timeline.end - found.timeline.begin
    if median and spent > _LONG * median and spent > 0.1 * span_s:
        times = f"{spent / median:.0f} times the median of its group"
        yield f"Item {one.item} alone took {format_duration(spent)}, {times}."


def _idle_gpus(loads: Loads | None) -> Iterator[str]:
    hosts = loads.hosts.values() if loads is not None else ()
    values = sum(host.gpu_values for host in hosts)
    if values:
        busy = sum(host.gpu for host in hosts) / values
        if busy < _BUSY_PERCENT:
            advice = "larger batches, or several workers on a GPU (--gpus-per-worker 0.5), may help"
            yield f"The GPUs were busy for {busy:.0f}% of the sampled time: {advice}."
