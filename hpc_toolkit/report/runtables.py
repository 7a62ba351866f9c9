"""The parts of a run's report that are mostly tables, such as failures and settings."""

from __future__ import annotations

import json
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.axes import moment
from hpc_toolkit.report.charts import Box, boxes
from hpc_toolkit.report.page import Cell, Row, Section, Table, count, seconds
from hpc_toolkit.results.distributions import ACCURACY
from hpc_toolkit.system.quantities import counted, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hpc_toolkit.results.activity import Activity
    from hpc_toolkit.results.distributions import Loads, Range
    from hpc_toolkit.results.explain import Failures
    from hpc_toolkit.results.records import Attempt
    from hpc_toolkit.rundir.layout import Manifest

_DRAWN, _LISTED, _HOSTS = 20, 100, 200
_CHARS, _ITEM_CHARS, _TEXT_CHARS = 300, 200, 2_000
_WITHOUT_RESULT = ("failed", "permanent", "killed", "lost")
_ZONE = f"Times are in {time.strftime('%Z')}."


def results(ranges: Mapping[str, Range]) -> tuple[Table, ...]:
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


def durations(activity: Activity, items: dict[int, str]) -> list[Section]:
    ranked = activity.groups.ranked(_LISTED)
    if not ranked:
        return []
    stages = {stage for stage, _, _ in ranked}
    named = [(_group(stage, name, len(stages)), group) for stage, name, group in ranked]
    drawn = [
        Box(
            name=name,
            spots=(group.least_s, *map(group.quantile, (0.25, 0.5, 0.75, 0.95)), group.most_s),
            count=group.count,
        )
        for name, group in named[:_DRAWN]
    ]
    said = "; ".join(
        f"{box.name}: median {format_duration(box.spots[2])},"
        f" longest {format_duration(box.spots[5])}"
        for box in drawn[:5]
    )
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
    more = len(activity.groups.all) - len(ranked)
    note = f"Quantiles are accurate to {ACCURACY:.0%}."
    note += f" Left out: {counted(more, 'group')} with less time." if more > 0 else ""
    title = "Durations by group" if any(name for _, name, _ in ranked) else "Durations"
    picture = boxes(title, said, drawn)._replace(
        caption=(
            "Box: from 25 % to 75 % of the attempts that gave a result, with the median; line: from"
            " the shortest to 95 %; dot: the longest. The groups with the most time in all."
        )
    )
    tables = (Table(title="", columns=head, rows=rows, note=note), _longest(activity, items))
    return [Section(title=title, figures=(picture,), tables=tables)]


def _group(stage: str, name: str, stages: int) -> str:
    if not name:
        return stage if stages > 1 else "all items"
    return f"{stage}: {name}" if stages > 1 else name


def _longest(activity: Activity, items: dict[int, str]) -> Table:
    rows = [
        _attempt_row(activity, attempt, items.get(attempt.item, "")) for attempt in activity.longest
    ]
    head = ("item", "duration", "times the median", "outcome", "host", "content")
    note = "'times the median' compares with the results of the same group."
    return Table(title="Longest attempts", columns=head, rows=rows, note=note)


def _attempt_row(activity: Activity, attempt: Attempt, item: str) -> Row:
    group = activity.groups.of(attempt.stage, attempt.group)
    median = group.quantile(0.5) if group is not None else 0.0
    spent = attempt.seconds or 0.0
    ratio: str | Cell = Cell(f"{spent / median:.3g}", spent / median) if median > 0 else "unknown"
    shown = short(item, _ITEM_CHARS)
    return (count(attempt.item), seconds(spent), ratio, attempt.outcome, attempt.host, shown)


def short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def failures(groups: Sequence[Failures], activity: Activity | None) -> list[Section]:
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
        "error",
        "hosts",
        "when",
        "newest item",
        "raised at",
    )
    note = f"In errors, # stands for a number and PATH for a path. {_ZONE}"
    said: tuple[str, ...] = ()
    if activity is not None:
        counts = [(activity.outcomes[name], name) for name in _WITHOUT_RESULT]
        attempts = ", ".join(f"{number:,} {name}" for number, name in counts if number)
        said = (f"Attempts without a result: {attempts}.",) if attempts else ()
    table = Table(title="", columns=head, rows=rows, note=note)
    return [Section(title="Failures", paragraphs=said, tables=(table,))]


def deaths(activity: Activity) -> tuple[Table, ...]:
    if not activity.deaths:
        return ()
    rows: list[Row] = [
        (
            death.worker,
            death.host,
            moment(death.at, zone=False),
            death.evidence,
            death.explained or "no",
            count(death.item),
            "itself" if death.by == death.worker else death.by,
        )
        for death in activity.deaths
    ]
    head = ("worker", "host", "recorded at", "evidence", "explained", "item", "recorded by")
    more = activity.outcomes["deaths"] - len(rows)
    note = _ZONE + (f" Not listed: {counted(more, 'later death')}." if more > 0 else "")
    return (Table(title="Deaths of workers and executors", columns=head, rows=rows, note=note),)


def load_table(loads: Loads) -> Table:
    rows: list[Row] = []
    for host, load in sorted(loads.hosts.items())[:_HOSTS]:
        gpu = load.gpu_percent
        rows.append(
            (
                host,
                Cell(f"{load.cpu_percent:.1f}%", load.cpu_percent),
                Cell(format_size(load.rss_most), load.rss_most),
                count(load.gpus),
                "" if gpu is None else Cell(f"{gpu:.1f}%", gpu),
                Cell(format_size(load.gpu_memory_most), load.gpu_memory_most) if load.gpus else "",
                count(load.samples),
            )
        )
    head = ("host", "CPUs busy", "memory, most", "GPUs", "GPUs busy", "GPU memory, most", "samples")
    more = len(loads.hosts) - len(rows)
    note = f"Not listed: {counted(more, 'more host')}." if more > 0 else ""
    note += " Of very many samples, parts at equal distances were read." if loads.partly else ""
    title = "Use of CPUs and GPUs by host"
    return Table(title=title, columns=head, rows=rows, note=note.strip())


def settings(manifest: Manifest, made: float) -> Section:
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
