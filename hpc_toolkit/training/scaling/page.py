"""Format comparisons as a page of Markdown, or as data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.training.scaling.columns import (
    digits,
    machine_columns,
    results_columns,
    step_columns,
)
from hpc_toolkit.training.scaling.series import money
from hpc_toolkit.training.scaling.verdict import POSSIBLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpc_toolkit.training.scaling.claims import Finding
    from hpc_toolkit.training.scaling.columns import Column
    from hpc_toolkit.training.scaling.comparison import Comparison, Row
    from hpc_toolkit.training.scaling.serialshare import SerialShare
    from hpc_toolkit.training.scaling.series import Series
    from hpc_toolkit.training.scaling.verdict import Verdict

Judged = tuple["Comparison", "Verdict", tuple["Finding", ...]]
"""A comparison, its verdict, and the findings on claims about it."""


def as_markdown(judged: Sequence[Judged], notes: Sequence[str] = ()) -> str:
    """Return one section per series, after an overview table if there are several."""
    lines = ["# Scaling"]
    if len(judged) > 1:
        lines += ["", *_overview(judged)]
    for one in judged:
        lines += ["", *_section(one)]
    if any("exposed_s" in row.details for comparison, _, _ in judged for row in comparison.rows):
        lines += ["", "## How it was measured", "", *_MEANINGS]
    if notes:
        lines += ["", "## Left out", "", *(f"- {note}" for note in notes)]
    # A table ends with an empty line, which must not be doubled or end the page.
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


_MEANINGS = """\
- communication: the share of a step that is gone without the exchange of gradients (no_sync)
- exchange in a step: that share as a time; all-reduce apart: the same messages, with nothing else
  running; bytes / bandwidth: what the gradients take at the bandwidth of one message of 16 MiB
- spread: the least and the greatest that repeats give, no confidence interval; of a single repeat
  an interval of at least 95 %, which fewer than 6 steps cannot give
""".splitlines()


def _overview(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield a table with the advice for each series on a line."""
    yield "| | use | its rate or time | efficiency | its cost | the largest | statements |"
    yield "|---|---:|---:|---:|---:|---|---|"
    for comparison, verdict, findings in judged:
        series, largest = comparison.series, comparison.rows[-1].world_size
        row = next(one for one in comparison.rows if one.world_size == verdict.world_size)
        cost = f"{digits(row.gpu_hours)} GPU-hours"
        if row.cost is not None:
            cost = money(digits(row.cost), series.currency)
        told = [one.verdict for one in findings]
        wrong = sum(word.startswith("contradict") for word in told)
        cells = (
            _name(series),
            str(verdict.world_size) if len(comparison.rows) > 1 else "measure another",
            _speed(series, row),
            f"{row.efficiency:.1%}",
            f"{cost} for {series.work}",
            f"{verdict.word} on {largest}",
            f"{wrong} contradicted" if wrong else "hold" if "reproduced" in told else "",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _speed(series: Series, row: Row) -> str:
    if series.work_samples == series.work_size:
        return f"{digits(row.rate)} samples/s"
    return format_duration(row.hours * 3600)


def _name(series: Series) -> str:
    return " ".join(series.name.split())


def _section(one: Judged) -> Iterator[str]:
    comparison, verdict, findings = one
    series = comparison.series
    yield f"## {_name(series)}"
    yield ""
    yield headline(comparison, verdict)
    yield ""
    yield from (f"- {reason}" for reason in (*verdict.reasons, *series.notes))
    yield ""
    for columns in (results_columns(comparison), step_columns(), machine_columns()):
        yield from _table(comparison, list(columns))
    if findings:
        yield "| stated | verdict | computed |"
        yield "|---|---|---|"
        for finding in findings:
            yield f"| {_cell(finding.text)} | {finding.verdict} | {_cell(finding.computed)} |"


def headline(comparison: Comparison, verdict: Verdict) -> str:
    """Return the advice and the number that decided it."""
    last = comparison.rows[-1]
    if len(comparison.rows) == 1:
        return f"**Measure another world size**: {last.world_size} alone says nothing of scaling"
    below = " or ".join(map(str, verdict.below))
    advice = f"Use {verdict.world_size}{', not ' * bool(below)}{below}"
    advice += "" if verdict.certain else ", but measure again: repeats do not agree"
    doubt = ""
    if any(row.efficiency > POSSIBLE for row in comparison.rows):
        doubt = "; more than the ranks explain, see below"
    return (
        f"**{advice}** ({verdict.word} on {last.world_size}: {last.efficiency:.1%} efficiency, "
        f"at least {verdict.minimum:.0%} wanted{doubt})"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(comparison: Comparison, columns: Sequence[Column]) -> Iterator[str]:
    """Yield one row per world size and an empty line; nothing if no column has a value."""
    cells = [(head, [read(row) for row in comparison.rows]) for head, read in columns]
    # Omit a column that has no value for any world size.
    shown = [(head, column) for head, column in cells if any(one is not None for one in column)]
    if not shown:
        return
    yield "| world size | " + " | ".join(_cell(head) for head, _ in shown) + " |"
    yield "|" + "---:|" * (1 + len(shown))
    for number, row in enumerate(comparison.rows):
        values = [column[number] or "" for _, column in shown]
        yield f"| {row.world_size} | " + " | ".join(values) + " |"
    yield ""


def as_data(judged: Sequence[Judged], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of the page as JSON values; an unknown number is null."""
    return {
        "format": 1,
        "kind": "hpctk.scaling.analysis",
        "series": [_data(*one) for one in judged],
        "notes": list(notes),
    }


def _data(
    comparison: Comparison, verdict: Verdict, findings: tuple[Finding, ...]
) -> dict[str, Any]:
    series = comparison.series
    return {
        "name": series.name,
        "law": series.law,
        "work": series.work,
        "currency": series.currency,
        "cluster": series.cluster,
        "rows": [_row_data(row) for row in comparison.rows],
        "serial_share": _serial_data(comparison.serial),
        "advice": headline(comparison, verdict).replace("**", ""),
        "verdict": asdict(verdict),
        "notes": list(series.notes),
        "claims": [asdict(finding) for finding in findings],
    }


def _row_data(row: Row) -> dict[str, Any]:
    names = [name for name in row.__slots__ if name not in ("shares", "details", "rate")]
    known = {name: getattr(row, name) for name in names}
    return {**known, "rate_per_s": row.rate, "shares": dict(row.shares), **row.details}


def _serial_data(serial: SerialShare | None) -> dict[str, Any] | None:
    return None if serial is None else asdict(serial)
