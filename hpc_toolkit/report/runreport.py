"""The report of a run as sections of a page: what happened, when, on which workers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from shlex import quote
from typing import TYPE_CHECKING

from hpc_toolkit.report import runtables, runtimeline
from hpc_toolkit.report.charts import Part, shares
from hpc_toolkit.report.figures import COLOURS, GRID, Figure
from hpc_toolkit.report.page import Section
from hpc_toolkit.report.panel import failed_items, rate_text, time_left
from hpc_toolkit.results import activity as states
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.distributions import Loads, Range
    from hpc_toolkit.results.explain import Failures
    from hpc_toolkit.results.status import Status
    from hpc_toolkit.rundir.layout import Manifest


_CLOCKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The data of a report."""

    status: Status
    manifest: Manifest
    made: float
    """When these facts were read, in epoch seconds."""
    activity: Activity | None = None
    """None: no worker has started, or its files cannot be read."""
    loads: Loads | None = None
    """Samples of CPUs and GPUs."""
    failures: Sequence[Failures] = ()
    items: dict[int, str] | None = None
    """JSON of the items that the report names, by number."""
    search: Sequence[Section] = ()
    """Sections about the search of a campaign, its outcome first."""
    results: Mapping[str, Range] = field(default_factory=dict)
    """The numbers in the results of a list."""
    problems: Sequence[str] = ()
    """Parts of the run that could not be read."""


def sections(facts: RunFacts) -> list[Section]:
    """All sections, the most important ones first."""
    parts = [_outcome(facts), *runtables.failures(facts.failures, facts.activity)]
    parts += [*facts.search[1:], _progress(facts)]
    if facts.activity is not None and facts.activity.workers:
        timeline = runtimeline.timeline(facts.activity, facts.loads)
        parts += [timeline, runtimeline.spent(facts.activity)]
        parts += runtables.durations(facts.activity, facts.items or {})
    return [*parts, runtables.settings(facts.manifest, facts.made)]


def title(facts: RunFacts) -> str:
    return f"Run {facts.status.run}"


def outcome(now: Status) -> tuple[str, str]:
    """What happened, and what to do next."""
    total = sum(stage.total for stage in now.stages.values())
    done = sum(stage.done for stage in now.stages.values())
    failed, run = failed_items(now), quote(now.run)
    in_or_after = "in" if now.complete else "after"
    took = f" {in_or_after} {format_duration(now.elapsed_s)}" if now.elapsed_s else ""
    happened = f"The run is {'' if now.complete else 'not '}complete: {done:,} of"
    happened += f" {counted(total, 'item')} {'is' if total == 1 else 'are'} done{took}"
    happened += f", and {failed:,} failed." if failed else "."
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
    if now.is_open:
        return f"{now.reason[0].upper()}{now.reason[1:]}."
    if now.reason:
        return f"It makes no progress: {now.reason}."
    left = time_left(now)
    return f"It goes on with {counted(now.workers.alive, 'worker')}{f', {left}' if left else ''}."


def _outcome(facts: RunFacts) -> Section:
    """The first screen: what was found, how sure it is and what to do next."""
    now = facts.status
    happened, then = outcome(now)
    said = [
        *_clocks(facts.activity),
        *(f"Not in this report: {problem}." for problem in facts.problems),
    ]
    if not facts.search:
        tables = runtables.results(facts.results)
        return Section(title="Outcome", paragraphs=(happened, then, *said), tables=tables)
    search = facts.search[0]
    # The sentences about a search end with the next step.
    said = [happened, *([] if now.complete and not failed_items(now) else [then]), *said]
    return replace(search, title="Outcome", paragraphs=(*search.paragraphs, *said))


def _progress(facts: RunFacts) -> Section:
    now = facts.status
    return Section(
        title="Items and workers",
        paragraphs=tuple(
            f"Warning: {warning}." for warning in (*now.warnings, now.doctor) if warning
        ),
        facts=tuple(_tiles(now, facts.activity)),
        figures=(_items(now),) if any(stage.total for stage in now.stages.values()) else (),
        bullets=tuple(runtimeline.findings(facts.activity, facts.loads)),
    )


def _clocks(activity: Activity | None) -> Iterator[str]:
    """A warning that names the hosts whose clocks are off."""
    if activity is None or not activity.ahead:
        return
    ranked = sorted(activity.ahead.items(), key=lambda one: -abs(one[1]))
    said = [
        f"{host} is {format_duration(abs(late))} {'ahead' if late > 0 else 'behind'}"
        for host, late in ranked[:_CLOCKS]
    ]
    said += [f"{len(ranked) - _CLOCKS:,} more"] if len(ranked) > _CLOCKS else []
    yield (
        f"Warning: clocks differ from that of the file server: {', '.join(said)}. The timeline"
        " uses corrected times; the table of failures and other commands show recorded times."
    )


def _tiles(now: Status, activity: Activity | None) -> Iterator[tuple[str, str]]:
    yield "items done", f"{sum(stage.done for stage in now.stages.values()):,}"
    yield "items failed", f"{failed_items(now):,}"
    if now.elapsed_s:
        yield "time", format_duration(now.elapsed_s)
    if now.cost:
        yield "cost so far", f"{now.cost['spent']:,.2f} {now.cost['currency']}"
    if activity is None or not activity.workers:
        return
    # The host of a worker whose file cannot be read is not known.
    on = f" on {counted(len(activity.hosts), 'host')}" if activity.hosts else ", host unknown"
    yield "workers", f"{activity.workers:,}{on}"
    yield "worker time", format_duration(activity.lives_s)
    if activity.lives_s > 0:
        yield "of it in results", f"{activity.seconds[states.WORK] / activity.lives_s:.1%}"
    done = sum(stage.done for stage in now.stages.values())
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
    return shares("Items by state", said, list(stages.items()))
