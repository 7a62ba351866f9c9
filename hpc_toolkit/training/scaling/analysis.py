"""Analyze measurements: compare their world sizes, judge them, show a table and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_toolkit.system.quantities import format_duration, format_size
from hpc_toolkit.training.scaling.comparison import (
    FAIR,
    POSSIBLE,
    THOUSAND,
    Comparison,
    Row,
    Series,
    Verdict,
    compare,
    judge,
    money,
    priced,
)
from hpc_toolkit.training.scaling.records import parameters_text, read_source

Column = tuple[str, str, "Callable[[Any], str]"]
"""A heading, the key of :func:`_values` and a format."""


@dataclass(frozen=True, slots=True)
class Analysis:
    judged: list[tuple[Comparison, Verdict]]
    """Each series with its verdict."""

    def as_json(self) -> str:
        """Return the page's numbers as JSON; an unknown number is null."""
        found = {
            "format": 1,
            "kind": "hpctk.scaling.analysis",
            "series": [_data(*one) for one in self.judged],
            "notes": [],
        }
        return json.dumps(found, allow_nan=False) + "\n"

    def as_markdown(self) -> str:
        """Return one section per series, after an overview table if there are several."""
        parts = ["# Scaling"]
        if len(self.judged) > 1:
            parts.append("\n".join(_overview(self.judged)))
        for comparison, verdict in self.judged:
            parts += _section(comparison, verdict)
        return "\n\n".join(parts) + "\n"


def analyze(
    sources: Iterable[Path],
    *,
    samples: int | None = None,
    price_per_gpu_hour: float | None = None,
    min_efficiency: float | None = None,
    cluster: str | None = None,
) -> Analysis:
    """Analyze directories and files.

    Args:
        sources: what :func:`~hpc_toolkit.training.scaling.records.read_source` reads.
        samples: number of samples whose time and cost are shown; None for 1,000.
        price_per_gpu_hour: price that replaces every other price; None to look for one.
        min_efficiency: lowest efficiency that is wanted; None for :data:`FAIR`.
        cluster: the cluster whose prices apply; None for the measured one.

    Raises ConfigError if a source cannot be read.
    """
    found = Analysis([])
    for path in sources:
        for one in read_source(path):
            series = replace(one, samples=samples or THOUSAND)
            compared = compare(
                priced(series, price_per_gpu_hour=price_per_gpu_hour, cluster=cluster)
            )
            minimum = FAIR if min_efficiency is None else min_efficiency
            found.judged.append((compared, judge(compared, minimum)))
    return found


def results_columns(series: Series) -> list[Column]:
    # 1,000 samples are too few for a time that means anything; their cost has its own column.
    chosen = series.samples != THOUSAND

    def cost(amount: float) -> str:
        return money(digits(amount), series.currency)

    return [
        ("samples/s", "rate_per_s", digits),
        ("tokens/s", "tokens_per_s", digits),
        *([(f"time of {series.work}", "seconds", format_duration)] if chosen else []),
        ("speed-up", "speedup", "{:.2f}".format),
        ("efficiency", "efficiency", _percent),
        ("its spread", "efficiency_range", _range),
        (f"GPU-hours of {series.work}", "gpu_hours", digits),
        ("premium", "premium", "{:+.1%}".format),
        *([("cost", "cost", cost)] if chosen else []),
        ("cost per 1,000 samples", "cost_per_1000", cost),
    ]


def _milliseconds(seconds: float) -> str:
    # Whole milliseconds are too coarse for the steps of small models.
    return f"{1000 * seconds:.4g} ms"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} to {ends[1]:.1%}"


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes)) if size_bytes else ""


_percent = "{:.1%}".format
_STEP: list[Column] = [
    ("step, median", "step_median_s", _milliseconds),
    ("p90", "step_p90_s", _milliseconds),
    ("memory of rank 0", "rss_bytes", _size),
]


def _values(row: Row) -> dict[str, Any]:
    """Return the values of a row by the keys of columns; unknown ones are missing or None."""
    found = {**_row_data(row), "seconds": 3600 * row.hours}
    if row.repeats > 1:
        found["efficiency_range"] = (row.low, row.high)
    return found


def digits(number: float) -> str:
    """Format four digits or more without an exponent, so that rows can be compared."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}".rstrip(".")


def _overview(judged: Sequence[tuple[Comparison, Verdict]]) -> Iterator[str]:
    yield "| | use | its rate | efficiency | its cost |"
    yield "|---|---:|---:|---:|---:|"
    for comparison, verdict in judged:
        series = comparison.series
        row = next(one for one in comparison.rows if one.world_size == verdict.world_size)
        cost = f"{digits(row.gpu_hours)} GPU-hours"
        if row.cost is not None:
            cost = money(digits(row.cost), series.currency)
        cells = (
            _name(series),
            str(verdict.world_size) if len(comparison.rows) > 1 else "measure another",
            f"{digits(row.rate)} samples/s",
            f"{row.efficiency:.1%}",
            f"{cost} for {series.work}",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _name(series: Series) -> str:
    return " ".join(series.name.split())


def _section(comparison: Comparison, verdict: Verdict) -> Iterator[str]:
    series = comparison.series
    yield f"## {_name(series)}"
    yield headline(comparison, verdict)
    trained = filter(None, dict.fromkeys(parameters_text(row.details) for row in comparison.rows))
    yield "\n".join(f"- {reason}" for reason in (*trained, *verdict.reasons, *series.notes))
    rows = [_values(row) for row in comparison.rows]
    tables = (_table(rows, columns) for columns in (results_columns(series), _STEP))
    yield from filter(None, tables)


def headline(comparison: Comparison, verdict: Verdict) -> str:
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


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """Return a table with one row per world size; "" if no column has a value."""
    shown = {
        _cell(head): ["" if row.get(key) is None else form(row[key]) for row in rows]
        for head, key, form in columns
    }
    # Omit a column that has no value for any world size.
    shown = {head: cells for head, cells in shown.items() if any(cells)}
    if not shown:
        return ""
    lines = [f"| world size | {' | '.join(shown)} |", "|" + "---:|" * (1 + len(shown))]
    for row, *cells in zip(rows, *shown.values(), strict=True):
        lines.append(f"| {row['world_size']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _data(comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    series = comparison.series
    return {
        "name": series.name,
        "law": series.law,
        "work": series.work,
        "currency": series.currency,
        "cluster": series.cluster,
        "rows": [_row_data(row) for row in comparison.rows],
        "advice": headline(comparison, verdict).replace("**", ""),
        "verdict": asdict(verdict),
        "notes": list(series.notes),
    }


def _row_data(row: Row) -> dict[str, Any]:
    names = [name for name in row.__slots__ if name not in ("details", "rate")]
    known = {name: getattr(row, name) for name in names}
    return {**known, "rate_per_s": row.rate, **row.details}
