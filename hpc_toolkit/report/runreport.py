"""The report of a run as sections of a page: what happened, when, on which workers."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report import runtables
from hpc_toolkit.report.axes import moment
from hpc_toolkit.report.charts import (
    Curve,
    Part,
    over_time,
    shares,
    sparks,
    text_bars,
)
from hpc_toolkit.report.figures import COLOURS, GRID
from hpc_toolkit.report.findings import findings
from hpc_toolkit.report.gantt import STATE_COLOURS, begin_of, gantt
from hpc_toolkit.report.page import Cell, Figure, Section, Table, seconds
from hpc_toolkit.report.panel import failed_items, panel, rate_text, time_left
from hpc_toolkit.results import activity as states
from hpc_toolkit.system.quantities import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.report.panel import Row as PanelRow
    from hpc_toolkit.report.runtables import Job
    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.failures import Failures
    from hpc_toolkit.results.lanes import Timeline
    from hpc_toolkit.results.loads import Loads, Spread
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.rundir.layout import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a report is made from."""

    status: Status
    manifest: Manifest
    made: float
    """When these facts were read, in epoch seconds."""
    activity: Activity | None = None
    """None: no worker has started, or its files cannot be read."""
    loads: Loads | None = None
    """Samples of CPUs and GPUs."""
    failures: Sequence[Failures] = ()
    jobs: Sequence[Job] = ()
    """Jobs as their records say; Slurm is not asked."""
    items: dict[int, str] | None = None
    """JSON of the items that the report names, by number."""
    scripts: Sequence[tuple[str, str]] = ()
    """Name and text of submitted scripts."""
    search: Sequence[Section] = ()
    """Sections about the search of a campaign."""
    problems: Sequence[str] = ()
    """Parts of the run that could not be read."""


def sections(facts: RunFacts) -> list[Section]:
    """All sections, the most important ones first."""
    found = [_outcome(facts), *facts.search]
    if facts.activity is not None and facts.activity.workers:
        found += [_timeline(facts), _spent(facts.activity)]
        found += runtables.durations(facts.activity, facts.items or {})
    found += runtables.failures(facts.failures, facts.activity)
    found += runtables.jobs(facts.jobs, facts.activity)
    return [*found, runtables.settings(facts.manifest, facts.scripts, facts.made)]


def title(facts: RunFacts) -> str:
    return f"Run {facts.status.run}"


def outcome(now: Status) -> tuple[str, str]:
    """What happened, and what to do next."""
    total = sum(one.total for one in now.stages.values())
    done = sum(one.done for one in now.stages.values())
    failed, run = failed_items(now), quote(now.run)
    took = f" in {format_duration(now.elapsed_s)}" if now.elapsed_s else ""
    if now.complete:
        happened = f"The run is complete: {done:,} of {total:,} items are done{took}"
        happened += f", and {failed:,} failed." if failed else "."
    else:
        happened = f"The run is not complete: {done:,} of {total:,} items are done{took}"
        happened += f", {failed:,} failed." if failed else "."
    return happened, _next(now, run, failed)


def _next(now: Status, run: str, failed: int) -> str:
    if now.complete and failed:
        return (
            f"Fix the cause of the failures below, then run 'hpctk retry {run}' and start workers."
        )
    if now.complete and not now.published:
        return f"Run 'hpctk gather {run}' to write the results."
    if now.complete:
        return "Nothing is left to do: the results are published."
    if now.reason:
        return f"It makes no progress: {now.reason}."
    left = time_left(now)
    return f"{now.workers.alive:,} workers go on{f', {left}' if left else ''}."


def _outcome(facts: RunFacts) -> Section:
    now = facts.status
    rows = [(row.label, row.text) for row in _status_rows(now)]
    problems = [f"Not in this report: {problem}." for problem in facts.problems]
    return Section(
        title="Outcome",
        paragraphs=(*outcome(now), *problems),
        facts=tuple(_tiles(now, facts.activity)),
        figures=(_items(now),) if any(one.total for one in now.stages.values()) else (),
        bullets=tuple(findings(facts.activity, facts.loads)),
        tables=(
            Table(
                title="Status",
                columns=(),
                rows=rows,
                note=f"As of {moment(facts.made)}; 'hpctk status {quote(now.run)}' shows it now.",
            ),
        ),
    )


def _status_rows(now: Status) -> Iterator[PanelRow]:
    """The rows of a status without its title and its failures, which have their own section."""
    about_failures = False
    for row in panel(now):
        about_failures = row.label in ("failed", "retrying") or (about_failures and not row.label)
        if not row.is_title and not about_failures:
            yield row


def _tiles(now: Status, found: Activity | None) -> Iterator[tuple[str, str]]:
    yield "items done", f"{sum(one.done for one in now.stages.values()):,}"
    yield "items failed", f"{failed_items(now):,}"
    if now.elapsed_s:
        yield "time", format_duration(now.elapsed_s)
    if found is None or not found.workers:
        return
    hosts = len(found.hosts)
    yield "workers", f"{found.workers:,} on {hosts:,} host{'s' * (hosts != 1)}"
    yield "worker time", format_duration(found.lives_s)
    if found.lives_s > 0:
        yield "of it in results", f"{found.seconds[states.WORK] / found.lives_s:.1%}"
    done = sum(one.done for one in now.stages.values())
    if now.elapsed_s and done:
        yield "average speed", rate_text(done / now.elapsed_s)


_ITEM_STATES = (
    ("done", COLOURS[2]),
    ("failed", COLOURS[1]),
    ("running", COLOURS[0]),
    ("claimed", COLOURS[4]),
    ("pending", GRID),
)


def _items(now: Status) -> Figure:
    stages = {
        name: [
            Part(state, getattr(counts, state), f"{getattr(counts, state):,}", colour)
            for state, colour in _ITEM_STATES
        ]
        for name, counts in now.stages.items()
        if counts.total
    }
    said = "; ".join(
        f"{name}: " + ", ".join(f"{part.label} {part.name}" for part in parts if part.value)
        for name, parts in stages.items()
    )
    return Figure(
        title="Items by state",
        svg=shares("Items by state", list(stages.items()), alternative=said),
        alt=said,
        text="\n\n".join(f"{name}\n{text_bars(parts)}" for name, parts in stages.items()),
    )


def _timeline(facts: RunFacts) -> Section:
    assert facts.activity is not None
    line = facts.activity.timeline
    shown = f"{len(line.lanes)} lane{'s' * (len(line.lanes) != 1)}"
    said = f"{facts.activity.workers:,} workers in {shown}, from {moment(line.begin)}."
    deaths = facts.activity.outcomes["deaths"]
    said += f" {deaths:,} deaths of workers or executors were recorded." if deaths else ""
    tables = (
        (runtables.load_table(facts.loads),)
        if facts.loads is not None and facts.loads.hosts
        else ()
    )
    return Section(
        title="Timeline",
        paragraphs=(said,),
        figures=(_throughput(facts, line), _workers(facts.activity, said), *_loads(facts, line)),
        tables=(*tables, *runtables.deaths(facts.activity)),
    )


def _throughput(facts: RunFacts, line: Timeline) -> Figure:
    """Items done and living workers, by interval of the timeline."""
    rates = _rates(facts.status.throughput, line)
    alive = [
        sum(lane.lives.get(one, 0.0) for lane in line.lanes) / line.width_s
        for one in range(line.intervals)
    ]
    best = max(rates, default=0.0)
    said = f"At most {rate_text(best)} and {max(alive, default=0):.0f} workers at one time."
    unit, scale = _rate_unit(best)
    curves = [
        Curve(name=f"items done per {unit}", values=[one * scale for one in rates]),
        Curve(name="living workers", values=alive, whole=True),
    ]
    name = "Throughput"
    return Figure(
        title=name,
        svg=_over_time(name, line, curves, said),
        alt=said,
        text=f"items    {sparks(rates)}\nworkers  {sparks(alive)}",
    )


def _over_time(name: str, line: Timeline, curves: Sequence[Curve], said: str) -> str:
    span_s, left = line.end - line.begin, begin_of(line)
    return over_time(name, span_s, curves, alternative=said, left=left)


def _rates(spent: dict[str, Any], line: Timeline) -> list[float]:
    """Items per second in each interval of the timeline, from a status's own intervals."""
    cells: dict[int, float] = {}
    width_s = spent.get("width_s") or 1.0
    for number, done in enumerate(spent.get("done", ())):
        begin = spent["begin"] + number * width_s
        low, high = max(begin, line.begin), min(begin + width_s, line.end)
        if done and high > low:
            line.fill(cells, low, high, done / (high - low))
    return [cells.get(one, 0.0) / line.width_s for one in range(line.intervals)]


def _rate_unit(rate_per_s: float) -> tuple[str, float]:
    for unit, scale in (("second", 1), ("minute", 60)):
        if rate_per_s * scale >= 1:
            return unit, scale
    return "hour", 3600


def _workers(found: Activity, said: str) -> Figure:
    name = "Workers by host"
    lines = []
    for lane in found.timeline.lanes[:40]:
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
            " state; grey is the rest of their lives. Times are those of each host's clock."
        ),
        text="\n".join(lines),
    )


def _loads(facts: RunFacts, line: Timeline) -> tuple[Figure, ...]:
    loads = facts.loads
    if loads is None or not loads.hosts:
        return ()
    curves = [
        _load_curve(words, spread, line)
        for words, spread in (("CPUs busy (%)", loads.cpu), ("GPUs busy (%)", loads.gpu))
        if spread.total
    ]
    said = f"Samples of {len(loads.hosts)} host{'s' * (len(loads.hosts) != 1)}"
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


def _spent(found: Activity) -> Section:
    used = {state: spent for state, spent in found.seconds.items() if spent > 0}
    parts = [
        Part(one, spent, format_duration(spent), STATE_COLOURS[one]) for one, spent in used.items()
    ]
    said = ", ".join(f"{part.name} {part.label}" for part in parts)
    total = max(found.lives_s, 1e-9)
    rows = [
        (
            one,
            seconds(spent, total),
            Cell(f"{spent / total:.1%}", spent / total),
            states.STATES[one],
        )
        for one, spent in used.items()
    ]
    name = "Where the time of the workers went"
    lives = f"The {found.workers:,} workers lived {format_duration(found.lives_s)} in total,"
    lives += " from their starts to their last signs of life. Each second is counted once."
    return Section(
        title=name,
        paragraphs=(lives,),
        figures=(
            Figure(
                title="Worker time by state",
                svg=shares("Worker time by state", [("", parts)], alternative=said),
                alt=said,
                text=text_bars(parts),
            ),
        ),
        tables=(Table(title="", columns=("state", "time", "share", "meaning"), rows=rows),),
    )
