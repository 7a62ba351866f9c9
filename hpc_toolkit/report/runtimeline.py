"""The timeline of a run's report, and where the time of its workers went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.report import runtables
from hpc_toolkit.report.axes import moment
from hpc_toolkit.report.charts import Curve, Part, over_time, shares, sparks
from hpc_toolkit.report.gantt import STATE_COLOURS, begin_of, gantt
from hpc_toolkit.report.page import Cell, Figure, Section, Table, seconds
from hpc_toolkit.report.panel import rate_text
from hpc_toolkit.results import activity as states
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.lanes import Timeline
    from hpc_toolkit.results.loads import Loads, Spread


def timeline(found: Activity, loads: Loads | None) -> Section:
    """Throughput, workers and load on one axis of time."""
    line = found.timeline
    shown = counted(len(line.drawn), "lane")
    said = f"{counted(found.workers, 'worker')} in {shown}, from {moment(line.begin)}."
    deaths = found.outcomes["deaths"]
    said += f" Recorded: {counted(deaths, 'death')} of workers or executors." if deaths else ""
    tables = (runtables.load_table(loads),) if loads is not None and loads.hosts else ()
    return Section(
        title="Timeline",
        paragraphs=(said,),
        figures=(_throughput(found), _workers(found, said), *_loads(loads, line)),
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
    best, most = max(rates), max(alive)
    said = f"Up to {rate_text(best)}" if best else "No item was done"
    said += f"; living workers: up to {most:.3g} (means of {format_duration(line.width_s)})."
    unit, scale = _rate_unit(best)
    curves = [Curve(name="living workers", values=alive, whole=True)]
    if best:
        values = [one * scale for one in rates]
        curves.insert(0, Curve(name=f"items done per {unit}", values=values))
    name = "Throughput"
    return Figure(
        title=name,
        svg=_over_time(name, line, curves, said),
        alt=said,
        text=f"items    {sparks(rates)}\n" * bool(best) + f"workers  {sparks(alive)}",
    )


def _over_time(name: str, line: Timeline, curves: Sequence[Curve], said: str) -> str:
    span_s, left = line.end - line.begin, begin_of(line)
    return over_time(name, span_s, curves, alternative=said, left=left)


def _rate_unit(rate_per_s: float) -> tuple[str, float]:
    for unit, scale in (("second", 1), ("minute", 60)):
        if rate_per_s * scale >= 1:
            return unit, scale
    return "hour", 3600


def _workers(found: Activity, said: str) -> Figure:
    name = "Workers by host"
    lines = []
    for lane in found.timeline.drawn[:40]:
        busy = lane.spent.get(states.WORK, {})
        values = [busy.get(one, 0.0) for one in range(found.timeline.intervals)]
        marks = ", ".join(sorted({kind for _, kind in lane.marks}))
        lines.append(f"{lane.host[:20]:<20} {sparks(values)} {marks}".rstrip())
    return Figure(
        title=name,
        svg=gantt(name, found.timeline, alternative=said),
        alt=said,
        caption=(
            "A lane shows one worker at a time, or all workers of a host if there are more than"
            " 200 lanes. It is filled by the share of each interval that its workers spent in a"
            " state; grey is the rest of their lives. Times are those of each host's clock, unless"
            " a warning says that they are corrected."
        ),
        text="\n".join(lines),
    )


def _loads(loads: Loads | None, line: Timeline) -> tuple[Figure, ...]:
    if loads is None or not loads.hosts:
        return ()
    curves = [
        _load_curve(words, spread, line)
        for words, spread in (("CPUs busy (%)", loads.cpu), ("GPUs busy (%)", loads.gpu))
        if spread.total
    ]
    said = f"Samples of {counted(len(loads.hosts), 'host')}"
    said += ": the line is the mean, and the band reaches from the least to the most of a sample."
    part = " Of very many samples, parts at equal distances were read." if loads.partly else ""
    name = "CPUs and GPUs"
    return (
        Figure(
            title=name,
            svg=_over_time(name, line, curves, said),
            alt=said,
            caption=said + part,
            text="\n".join(f"{curve.name:<14} {sparks(curve.values)}" for curve in curves),
        ),
    )


def _load_curve(words: str, found: Spread, line: Timeline) -> Curve:
    spread, factor = found.coarser()
    intervals = -(-line.intervals // factor)
    return Curve(
        name=words,
        values=spread.means(intervals),
        low=[spread.least.get(one) for one in range(intervals)],
        high=[spread.most.get(one) for one in range(intervals)],
        most=100.0,
        width_s=factor * line.width_s,
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
        figures=(
            Figure(
                title="Worker time by state",
                svg=shares("Worker time by state", [("", parts)], alternative=said),
                alt=said,
            ),
        ),
        tables=(Table(title="", columns=("state", "time", "share", "meaning"), rows=rows),),
    )
