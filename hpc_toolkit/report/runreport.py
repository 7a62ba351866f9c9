"""The report of a run as sections of a page: what happened, when, on which workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from shlex import quote
from statistics import median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report import runtimeline
from hpc_toolkit.report.figures import moment
from hpc_toolkit.report.page import Cell, Row, Section, Table, count, seconds
from hpc_toolkit.report.panel import failed_items, panel, short, time_left
from hpc_toolkit.results.activity import OTHERS, Activity
from hpc_toolkit.results.sums import ACCURACY, Range
from hpc_toolkit.rundir.layout import Manifest, StageSpec
from hpc_toolkit.system.quantities import counted, format_duration

if TYPE_CHECKING:
    from hpc_toolkit.results.explain import Failures
    from hpc_toolkit.results.status import Status

_LISTED = 100
_CHARS, _ITEM_CHARS, _TEXT_CHARS = 300, 200, 2_000
_WITHOUT_RESULT = ("failed", "permanent", "killed", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The data of a report."""

    status: Status
    manifest: Manifest
    made: float
    """When these facts were read, in epoch seconds."""
    activity: Activity | None = None
    """None: no worker has started, or its files cannot be read."""
    used: str = ""
    """The share of CPUs, GPUs and memory that the jobs used, on one line."""
    failures: Sequence[Failures] = ()
    search: Sequence[Section] = ()
    """Sections about the search of a campaign, its outcome first."""
    results: Mapping[str, Range] = field(default_factory=dict)
    """The numbers in the results of a list."""
    problems: Sequence[str] = ()
    """Parts of the run that could not be read."""


def sections(facts: RunFacts) -> list[Section]:
    """All sections, the most important ones first."""
    parts = [
        _outcome(facts),
        *_stages(facts),
        *_failures(facts.failures, facts.activity, staged=_follow(facts.manifest)),
    ]
    parts += [*facts.search[1:], _status(facts)]
    if facts.activity is not None and facts.activity.workers:
        parts += [runtimeline.timeline(facts.activity), runtimeline.spent(facts.activity)]
        parts += _durations(facts.activity)
    return [*parts, _settings(facts.manifest, facts.made)]


def outcome(now: Status) -> tuple[str, str]:
    """What happened, and what to do next."""
    total = sum(stage.total for stage in now.stages.values())
    done = sum(stage.done for stage in now.stages.values())
    failed, run = failed_items(now), quote(now.run)
    in_or_after = "in" if now.complete else "after"
    took = f" {in_or_after} {format_duration(now.elapsed_s)}" if now.elapsed_s else ""
    happened = f"The run is {'' if now.complete else 'not '}complete: {done:,} of"
    happened += f" {counted(total, 'item')} {'is' if total == 1 else 'are'} done{took}"
    skipped = sum(stage.skipped for stage in now.stages.values())
    others = f"{failed:,} failed" + f", {skipped:,} skipped" * bool(skipped) if failed else ""
    happened += f"; {others}." if others else "."
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
    said = [f"Not in this report: {problem}." for problem in facts.problems]
    if not facts.search:
        tables = _results(facts.results)
        return Section(title="Outcome", paragraphs=(happened, then, *said), tables=tables)
    search = facts.search[0]
    # The sentences about a search end with the next step.
    said = [happened, *([] if now.complete and not failed_items(now) else [then]), *said]
    return replace(search, title="Outcome", paragraphs=(*search.paragraphs, *said))


def _stages(facts: RunFacts) -> Iterator[Section]:
    """A row for each stage of a run whose stages follow each other."""
    if not _follow(facts.manifest):
        return
    stages = [(one, facts.status.stages[one.name]) for one in facts.manifest.stages]
    time_s = dict.fromkeys(facts.status.stages, 0.0)
    for (name, _), group in facts.activity.groups.items() if facts.activity is not None else ():
        time_s[name] += group.total_s
    known = ("done", "failed", "skipped", "left", "waiting", "retried")
    words = [word for word in known if any(getattr(now, word) for _, now in stages)]
    rows: list[Row] = []
    for stage, now in stages:
        numbers = (count(getattr(now, word)) for word in words)
        spent = seconds(time_s[stage.name], max(time_s.values()))
        rows.append((stage.name, *numbers, spent, _after(stage), _skipped(facts, stage)))
    head = ("stage", *words, "time in all", "follows", "skipped after")
    yield Section(title="Stages", tables=(Table(title="", columns=head, rows=rows),))


def _follow(manifest: Manifest) -> bool:
    return len(manifest.stages) > 1 and any(one.after for one in manifest.stages)


def _after(stage: StageSpec) -> str:
    names = " and ".join(stage.after)
    if stage.by is None:
        return names
    return f"{names}, each {', '.join(stage.by)}" if stage.by else f"all of {names}"


def _skipped(facts: RunFacts, stage: StageSpec) -> str:
    """The stages before whose failures skipped items of a stage."""
    stages, left = facts.status.stages, list(stage.after)
    for name in left if stages[stage.name].skipped else ():
        left += [one for one in facts.manifest.stage(name).after if one not in left]
    names = [name for name in left if stages[name].failed] if stages[stage.name].skipped else []
    return f"failures of {' and '.join(names)}" if names else ""


def _status(facts: RunFacts) -> Section:
    """The rows of ``hpctk status``."""
    shown = panel(facts.status)[1:]
    if _follow(facts.manifest):  # the stages have a section
        shown = list(dropwhile(lambda row: row.bar or not row.label, shown))
    rows: list[Row] = [(row.label, row.text) for row in shown]
    rows += [("used", facts.used)] if facts.used else []
    return Section(title="Status", tables=(Table(title="", columns=(), rows=rows),))


def _results(ranges: Mapping[str, Range]) -> tuple[Table, ...]:
    """A row for each number in the results of a list."""
    rows: list[Row] = [
        (name, *map(_value, (range_.least, median(range_.some), range_.most)), count(range_.count))
        for name, range_ in ranges.items()
    ]
    head = ("result", "minimum", "median", "maximum", "items")
    return (Table(title="Results", columns=head, rows=rows, fits=True),) if rows else ()


def _value(value: float) -> Cell:
    return Cell(
        f"{value:,.0f}" if value.is_integer() and abs(value) < 1e9 else f"{value:.5g}", value
    )


def _durations(activity: Activity) -> list[Section]:
    ranked = sorted(
        activity.groups.items(), key=lambda one: (one[0][1] == OTHERS, -one[1].total_s)
    )[:_LISTED]
    if not ranked:
        return []
    stages = {stage for (stage, _), _ in ranked}
    named = [(_group(stage, name, len(stages)), group) for (stage, name), group in ranked]
    most = max(group.total_s for _, group in named)
    rows: list[Row] = [
        (
            name,
            count(group.count),
            seconds(group.total_s, most),
            *(seconds(group.quantile(share)) for share in (0.25, 0.5, 0.75, 0.95)),
            seconds(group.most_s),
        )
        for name, group in named
    ]
    head = ("group", "attempts", "time in all", "25 %", "median", "75 %", "95 %", "longest")
    more = len(activity.groups) - len(ranked)
    note = f"Quantiles are accurate to {ACCURACY:.0%}."
    note += f" Left out: {counted(more, 'group')} with less time." if more > 0 else ""
    title = "Durations by group" if any(name for (_, name), _ in ranked) else "Durations"
    return [Section(title=title, tables=(Table(title="", columns=head, rows=rows, note=note),))]


def _group(stage: str, name: str, stages: int) -> str:
    if not name:
        return stage if stages > 1 else "all items"
    return f"{stage}: {name}" if stages > 1 else name


def _failures(
    groups: Sequence[Failures], activity: Activity | None, *, staged: bool
) -> list[Section]:
    if not groups:
        return []
    rows: list[Row] = []
    retried = any(group.retrying for group in groups)
    for group in groups:
        hosts = sorted(group.hosts, key=lambda host: -group.hosts[host])
        where = ", ".join(f"{host} ({group.hosts[host]:,})" for host in hosts[:3])
        where += f" and {counted(len(hosts) - 3, 'more host')}" if len(hosts) > 3 else ""
        example = short(json.dumps(group.example, ensure_ascii=False), _ITEM_CHARS)
        times = [moment(at, zone=False) for at in (group.first, group.last) if at is not None]
        rows.append(
            (
                count(group.items),
                *([count(group.retrying)] * retried),
                *([group.stage] * staged),
                short(group.error, _CHARS),
                where,
                " to ".join(dict.fromkeys(times)),
                f"{group.item}: {example}",
                short(group.output, _CHARS),
            )
        )
    head = (
        "failed",
        *(["retrying"] * retried),
        *(["stage"] * staged),
        "error",
        "hosts",
        "when",
        "newest item",
        "raised at",
    )
    note = f"In errors, # stands for a number and PATH for a path. {runtimeline.ZONE}"
    said: tuple[str, ...] = ()
    if activity is not None:
        counts = [(activity.outcomes[name], name) for name in _WITHOUT_RESULT]
        attempts = ", ".join(f"{number:,} {name}" for number, name in counts if number)
        said = (f"Attempts without a result: {attempts}.",) if attempts else ()
    table = Table(title="", columns=head, rows=rows, note=note)
    return [Section(title="Failures", paragraphs=said, tables=(table,))]


def _settings(manifest: Manifest, made: float) -> Section:
    origin = dict(manifest.provenance)
    if isinstance(code := origin.get("code"), dict):  # of stages that run commands nothing is known
        origin["code"] = {
            stage: digest for stage, digest in code.items() if digest is not None
        } or None
    rows: list[Row] = []
    for stage in manifest.stages:
        code = stage.workload.function or stage.workload.command or ""
        rows.append((f"{stage.name}: code", short(code, _TEXT_CHARS)))
        if stage.workload.options:
            rows.append((f"{stage.name}: options", _json(stage.workload.options)))
        limits = ("group_by", "max_attempts", "timeout_s", "no_retry", "max_failures")
        values = {key: getattr(stage, key) for key in (*limits, "items_per_claim")}
        given = {key: value for key, value in values.items() if value is not None}
        rows.append((f"{stage.name}: settings", _json(given)))
    campaign = manifest.campaign or {}
    if isinstance(search := campaign.get("search"), dict):
        values = {"seed": campaign.get("seed"), **search}
        given = {key: value for key, value in values.items() if value not in (None, [], {})}
        rows.append(("search: settings", _json(given)))
    rows += [
        (key, short(value, _TEXT_CHARS) if isinstance(value, str) else _json(value))
        for key, value in origin.items()
        if key not in {"packages", "files", "argv"} and value is not None
    ]
    return Section(
        title="Settings and versions",
        paragraphs=(f"This report was made on {moment(made)}.",),
        tables=(Table(title="When the run was created", columns=(), rows=rows),),
    )


def _json(value: Any) -> str:
    return short(json.dumps(value, ensure_ascii=False), _TEXT_CHARS)
