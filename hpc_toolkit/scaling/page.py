"""A comparison as a page of Markdown, and as data."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc_toolkit.quantities import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.scaling.claims import Finding
    from hpc_toolkit.scaling.comparison import Comparison, Row
    from hpc_toolkit.scaling.serialshare import SerialShare
    from hpc_toolkit.scaling.verdict import Verdict

Judged = tuple["Comparison", "Verdict", tuple["Finding", ...]]
"""A comparison, its verdict, and what became of the claims about it."""


def as_markdown(judged: Sequence[Judged], notes: Sequence[str] = ()) -> str:
    """One section for each series."""
    lines = ["# Scaling"]
    for one in judged:
        lines += ["", *_section(one)]
    if notes:
        lines += ["", "## Left out", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _section(one: Judged) -> Iterator[str]:
    comparison, verdict, findings = one
    series = comparison.series
    yield f"## {' '.join(series.name.split())}"
    yield ""
    yield from _table(comparison)
    yield ""
    largest, advice = comparison.rows[-1].world_size, f"use {verdict.world_size}"
    if verdict.word == "unknown":
        advice = "measure another world size"
    wanted = f"efficiency of at least {verdict.minimum:.0%} wanted"
    yield f"**{verdict.word} on {largest}: {advice}** ({wanted})"
    yield ""
    yield from (f"- {reason}" for reason in (*verdict.reasons, *series.notes))
    if findings:
        yield ""
        yield "| stated | verdict | computed |"
        yield "|---|---|---|"
        for finding in findings:
            yield f"| {_cell(finding.text)} | {finding.verdict} | {_cell(finding.computed)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _columns(comparison: Comparison) -> Iterator[tuple[str, Callable[[Row], str | None]]]:
    series = comparison.series
    yield "world size", lambda row: str(row.world_size)
    if series.work_samples == series.work_size:
        yield "samples/s", lambda row: f"{row.rate:.4g}"
        yield "tokens/s", lambda row: _number(row, "tokens_per_s", "{:.4g}")
    else:
        yield f"time of {series.work}", lambda row: format_duration(row.hours * 3600)
    yield "speed-up", lambda row: f"{row.speedup:.2f}"
    yield "efficiency", lambda row: f"{row.efficiency:.1%}"
    yield "its spread", lambda row: f"{row.low:.1%} to {row.high:.1%}" if row.repeats > 1 else None
    yield "step", lambda row: _seconds(row, "step_median_s")
    yield "p90", lambda row: _seconds(row, "step_p90_s")
    yield "communication", lambda row: _share(row, "communication")
    yield "all-reduce apart", lambda row: _seconds(row, "all_reduce_s")
    yield "bytes / bandwidth", lambda row: _seconds(row, "expected_s")
    yield "loading", lambda row: _share(row, "loading")
    yield "memory of a rank", lambda row: _size(row, "rss_bytes")
    yield "GPU memory", lambda row: _size(row, "cuda_bytes")
    yield "CPUs busy", lambda row: _number(row, "cpu_percent", "{:.0f}%")
    yield "GPUs busy", lambda row: _number(row, "gpu_percent", "{:.0f}%")
    yield "power of a GPU", lambda row: _number(row, "gpu_power_w", "{:.0f} W")
    yield f"GPU-hours of {series.work}", lambda row: f"{row.gpu_hours:.4g}"
    yield "premium", lambda row: f"{row.premium:+.1%}"
    # That of 1,000 samples stands in the next column.
    if series.work_samples != 1000:
        yield "cost", lambda row: None if row.cost is None else f"${row.cost:.2f}"
    yield "cost per 1,000 samples", _cost


def _table(comparison: Comparison) -> Iterator[str]:
    cells = [(head, [read(row) for row in comparison.rows]) for head, read in _columns(comparison)]
    # What is known of no world size has no column.
    shown = [(head, column) for head, column in cells if any(one is not None for one in column)]
    yield "| " + " | ".join(_cell(head) for head, _ in shown) + " |"
    yield "|" + "---:|" * len(shown)
    for number in range(len(comparison.rows)):
        yield "| " + " | ".join(column[number] or "" for _, column in shown) + " |"


def _number(row: Row, key: str, words: str) -> str | None:
    return words.format(row.details[key]) if key in row.details else None


def _seconds(row: Row, key: str) -> str | None:
    # Thousandths of a second are too coarse for steps of small models.
    return f"{1000 * row.details[key]:.4g} ms" if key in row.details else None


def _share(row: Row, key: str) -> str | None:
    return f"{row.shares[key]:.1%}" if key in row.shares else None


def _size(row: Row, key: str) -> str | None:
    return format_size(round(row.details[key])) if row.details.get(key) else None


def _cost(row: Row) -> str | None:
    return None if row.cost_per_1000 is None else f"${row.cost_per_1000:.4g}"


def as_data(judged: Sequence[Judged], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The same as JSON; a number that nobody knows is null."""
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
        "rows": [_row_data(row) for row in comparison.rows],
        "serial_share": _serial_data(comparison.serial),
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
