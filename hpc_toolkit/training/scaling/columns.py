"""The columns of a comparison's tables: their headings, and the format of a row's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.system.quantities import format_duration, format_size
from hpc_toolkit.training.scaling.series import money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hpc_toolkit.training.scaling.comparison import Comparison, Row
    from hpc_toolkit.training.scaling.series import Series

    Column = tuple[str, Callable[[Row], str | None]]
    """A heading, and a function that returns a row's cell, or None for an unknown value."""


def results_columns(comparison: Comparison) -> Iterator[Column]:
    """Yield the columns of speed and cost."""
    series = comparison.series
    if series.work_samples == series.work_size:
        yield "samples/s", lambda row: digits(row.rate)
        yield "tokens/s", _tokens
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
    yield "step, median", lambda row: _seconds(row, "step_median_s")
    yield "p90", lambda row: _seconds(row, "step_p90_s")
    yield "loading", lambda row: _share(row, "loading")
    yield "communication", lambda row: _share(row, "communication") if _exchanges(row) else None
    yield "its spread", _communication_spread
    yield "exchange in a step", lambda row: _seconds(row, "exposed_s")
    yield "all-reduce apart", lambda row: _seconds(row, "all_reduce_s")
    yield "bytes / bandwidth", lambda row: _seconds(row, "expected_s")
    yield "gradients", lambda row: _size(row, "gradient_bytes")
    yield "bus bandwidth", _bandwidth


def machine_columns() -> Iterator[Column]:
    """Yield the columns of the ranks' memory and the use of CPUs and GPUs."""
    yield "memory of a rank", lambda row: _size(row, "rss_bytes")
    yield "GPU memory", lambda row: _size(row, "cuda_bytes")
    yield "CPUs busy", lambda row: _number(row, "cpu_percent", "{:.0f}%")
    yield "GPUs busy", lambda row: _number(row, "gpu_percent", "{:.0f}%")
    yield "the least busy", lambda row: _number(row, "gpu_percent_least", "{:.0f}%")
    yield "power of a GPU", lambda row: _number(row, "gpu_power_w", "{:.0f} W")


def _exchanges(row: Row) -> bool:
    return "exposed_s" in row.details


def _communication_spread(row: Row) -> str | None:
    ends = [row.details.get(f"communication_{end}") for end in ("low", "high")]
    known = [max(end, 0.0) for end in ends if end is not None]
    return f"{known[0]:.1%} to {known[1]:.1%}" if len(known) == 2 else None


def _bandwidth(row: Row) -> str | None:
    known = row.details.get("bus_bytes_per_s")
    return None if known is None else f"{known / 1e9:.3g} GB/s"


def _energy(row: Row) -> str | None:
    return None if row.energy_kwh is None else f"{digits(row.energy_kwh)} kWh"


def _number(row: Row, key: str, words: str) -> str | None:
    return words.format(row.details[key]) if key in row.details else None


def _seconds(row: Row, key: str) -> str | None:
    # Whole milliseconds are too coarse for the steps of small models.
    return f"{1000 * row.details[key]:.4g} ms" if key in row.details else None


def _share(row: Row, key: str) -> str | None:
    return f"{row.shares[key]:.1%}" if key in row.shares else None


def _size(row: Row, key: str) -> str | None:
    return format_size(round(row.details[key])) if row.details.get(key) else None


def _cost(amount: float | None, series: Series) -> str | None:
    return None if amount is None else money(digits(amount), series.currency)


def digits(number: float) -> str:
    """Format four digits or more without an exponent, so that rows can be compared."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}".rstrip(".")


def _tokens(row: Row) -> str | None:
    return digits(row.details["tokens_per_s"]) if "tokens_per_s" in row.details else None
