"""Format comparisons as a page of Markdown, or as data for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc_toolkit.system.quantities import format_duration, format_size
from hpc_toolkit.training.scaling.comparison import POSSIBLE
from hpc_toolkit.training.scaling.series import money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.training.scaling.comparison import Comparison, Row, Verdict
    from hpc_toolkit.training.scaling.series import Series

    Column = tuple[str, Callable[[Row], str | None]]
    """A heading, and a function that returns a row's cell, or None for an unknown value."""

Judged = tuple["Comparison", "Verdict"]


def results_columns(comparison: Comparison) -> Iterator[Column]:
    series = comparison.series
    if series.work_samples == series.work_size:
        yield "samples/s", lambda row: digits(row.rate)
        yield "tokens/s", _detail("tokens_per_s", digits)
    else:
        yield f"time of {series.work}", lambda row: format_duration(row.hours * 3600)
    yield "speed-up", lambda row: f"{row.speedup:.2f}"
    yield "efficiency", lambda row: f"{row.efficiency:.1%}"
    yield "its spread", lambda row: f"{row.low:.1%} to {row.high:.1%}" if row.repeats > 1 else None
    yield f"GPU-hours of {series.work}", lambda row: digits(row.gpu_hours)
    yield "premium", lambda row: f"{row.premium:+.1%}"
    # The next column has the cost of 1,000 samples.
    if series.work_samples != 1000:
        yield "cost", lambda row: _cost(row.cost, series)
    yield "cost per 1,000 samples", lambda row: _cost(row.cost_per_1000, series)
    yield f"energy of {series.work}", _energy


def step_columns() -> Iterator[Column]:
    """Yield the columns that divide the time of a step."""
    yield "step, median", _detail("step_median_s", _milliseconds)
    yield "p90", _detail("step_p90_s", _milliseconds)
    yield "loading", lambda row: _share(row, "loading")
    yield "communication", lambda row: _share(row, "communication", "exposed_s" in row.details)
    yield "its spread", _communication_spread
    yield "exchange in a step", _detail("exposed_s", _milliseconds)
    yield "all-reduce apart", _detail("all_reduce_s", _milliseconds)
    yield "bytes / bandwidth", _detail("expected_s", _milliseconds)
    yield "gradients", lambda row: _size(row, "gradient_bytes")
    yield "bus bandwidth", _detail("bus_bytes_per_s", lambda rate: f"{rate / 1e9:.3g} GB/s")


def machine_columns() -> Iterator[Column]:
    """Yield the columns of the ranks' memory and the use of CPUs and GPUs."""
    yield "memory of a rank", lambda row: _size(row, "rss_bytes")
    yield "GPU memory", lambda row: _size(row, "cuda_bytes")
    yield "CPUs busy", _detail("cpu_percent", "{:.0f}%".format)
    yield "GPUs busy", _detail("gpu_percent", "{:.0f}%".format)
    yield "the least busy", _detail("gpu_percent_least", "{:.0f}%".format)
    yield "power of a GPU", _detail("gpu_power_w", "{:.0f} W".format)


def _communication_spread(row: Row) -> str | None:
    ends = [row.details.get(f"communication_{end}") for end in ("low", "high")]
    known = [max(end, 0.0) for end in ends if end is not None]
    return f"{known[0]:.1%} to {known[1]:.1%}" if len(known) == 2 else None


def _energy(row: Row) -> str | None:
    return None if row.energy_kwh is None else f"{digits(row.energy_kwh)} kWh"


def _detail(key: str, form: Callable[[float], str]) -> Callable[[Row], str | None]:
    return lambda row: form(row.details[key]) if key in row.details else None


def _milliseconds(seconds: float) -> str:
    # Whole milliseconds are too coarse for the steps of small models.
    return f"{1000 * seconds:.4g} ms"


def _share(row: Row, key: str, known: bool = True) -> str | None:
    return f"{row.shares[key]:.1%}" if known and key in row.shares else None


def _size(row: Row, key: str) -> str | None:
    return format_size(round(row.details[key])) if row.details.get(key) else None


def _cost(amount: float | None, series: Series) -> str | None:
    return None if amount is None else money(digits(amount), series.currency)


def digits(number: float) -> str:
    """Format four digits or more without an exponent, so that rows can be compared."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}".rstrip(".")


def as_markdown(judged: Sequence[Judged], notes: Sequence[str] = ()) -> str:
    """Return one section per series, after an overview table if there are several."""
    lines = ["# Scaling"]
    if len(judged) > 1:
        lines += ["", *_overview(judged)]
    for one in judged:
        lines += ["", *_section(one)]
    if notes:
        lines += ["", "## Left out", "", *(f"- {note}" for note in notes)]
    # A table ends with an empty line, which must not be doubled or end the page.
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip("\n") + "\n"


def _overview(judged: Sequence[Judged]) -> Iterator[str]:
    yield "| | use | its rate or time | efficiency | its cost |"
    yield "|---|---:|---:|---:|---:|"
    for comparison, verdict in judged:
        series = comparison.series
        row = next(one for one in comparison.rows if one.world_size == verdict.world_size)
        cells = (
            _name(series),
            str(verdict.world_size) if len(comparison.rows) > 1 else "measure another",
            _speed(series, row),
            f"{row.efficiency:.1%}",
            f"{_cost(row.cost, series) or f'{digits(row.gpu_hours)} GPU-hours'} for {series.work}",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _speed(series: Series, row: Row) -> str:
    if series.work_samples == series.work_size:
        return f"{digits(row.rate)} samples/s"
    return format_duration(row.hours * 3600)


def _name(series: Series) -> str:
    return " ".join(series.name.split())


def _section(one: Judged) -> Iterator[str]:
    comparison, verdict = one
    series = comparison.series
    yield f"## {_name(series)}"
    yield ""
    yield headline(comparison, verdict)
    yield ""
    yield from (f"- {reason}" for reason in (*verdict.reasons, *series.notes))
    yield ""
    for columns in (results_columns(comparison), step_columns(), machine_columns()):
        yield from _table(comparison, list(columns))


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


def _data(comparison: Comparison, verdict: Verdict) -> dict[str, Any]:
    series = comparison.series
    return {
        "name": series.name,
        "law": series.law,
        "work": series.work,
        "currency": series.currency,
        "cluster": series.cluster,
        "rows": [_row_data(row) for row in comparison.rows],
        "serial_share": asdict(comparison.serial) if comparison.serial is not None else None,
        "advice": headline(comparison, verdict).replace("**", ""),
        "verdict": asdict(verdict),
        "notes": list(series.notes),
    }


def _row_data(row: Row) -> dict[str, Any]:
    names = [name for name in row.__slots__ if name not in ("shares", "details", "rate")]
    known = {name: getattr(row, name) for name in names}
    return {**known, "rate_per_s": row.rate, "shares": dict(row.shares), **row.details}
