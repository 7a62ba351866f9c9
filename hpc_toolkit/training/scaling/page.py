"""Show comparisons: as a page of Markdown, as data for JSON, and as a picture."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hpc_toolkit.report.axes import Axis
from hpc_toolkit.report.charts import Plot, Series, plots
from hpc_toolkit.report.figures import COLOURS, DASHED, DIM, DOTTED
from hpc_toolkit.system.quantities import format_duration, format_size
from hpc_toolkit.training.scaling.comparison import POSSIBLE
from hpc_toolkit.training.scaling.records import parameters_text
from hpc_toolkit.training.scaling.series import THOUSAND, money

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hpc_toolkit.training.scaling.comparison import Comparison, Row, Verdict
    from hpc_toolkit.training.scaling.loaders import LoaderAdvice
    from hpc_toolkit.training.scaling.series import Series as Measured

Judged = tuple["Comparison", "Verdict"]
Column = tuple[str, str, "Callable[[Any], str]"]
"""A heading, the key of :func:`_values` and a format."""


def results_columns(series: Measured) -> list[Column]:
    spent = f"GPU-hours of {series.work}"
    time: Column = (f"time of {series.work}", "seconds", format_duration)
    rates = [time]
    if series.work_samples == series.work_size:
        rates = [("samples/s", "rate_per_s", digits), ("tokens/s", "tokens_per_s", digits)]
        # Without a wish, the work is too small for a time that means anything.
        rates += [] if series.work_size == THOUSAND else [time]

    def cost(amount: float) -> str:
        return money(digits(amount), series.currency)

    return [
        *rates,
        ("speed-up", "speedup", "{:.2f}".format),
        ("efficiency", "efficiency", _percent),
        ("its spread", "efficiency_range", _range),
        (spent, "gpu_hours", digits),
        ("premium", "premium", "{:+.1%}".format),
        # The next column has the cost of 1,000 samples.
        *([("cost", "cost", cost)] if series.work_samples != 1000 else []),
        ("cost per 1,000 samples", "cost_per_1000", cost),
        (f"energy of {series.work}", "energy_kwh", lambda energy: f"{digits(energy)} kWh"),
    ]


def _milliseconds(seconds: float) -> str:
    # Whole milliseconds are too coarse for the steps of small models.
    return f"{1000 * seconds:.4g} ms"


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} to {ends[1]:.1%}"


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes)) if size_bytes else ""


_percent = "{:.1%}".format
_whole_percent = "{:.0f}%".format
_STEP: list[Column] = [
    ("step, median", "step_median_s", _milliseconds),
    ("p90", "step_p90_s", _milliseconds),
    ("loading", "loading", _percent),
    ("communication", "communication", _percent),
    ("its spread", "communication_range", _range),
    ("exchange in a step", "exposed_s", _milliseconds),
    ("all-reduce apart", "all_reduce_s", _milliseconds),
    ("bytes / bandwidth", "expected_s", _milliseconds),
    ("gradients", "gradient_bytes", _size),
    ("bus bandwidth", "bus_bytes_per_s", lambda rate: f"{rate / 1e9:.3g} GB/s"),
]
"""How the time of a step is divided."""
_MACHINE: list[Column] = [
    ("memory of a rank", "rss_bytes", _size),
    ("GPU memory", "cuda_bytes", _size),
    ("CPUs busy", "cpu_percent", _whole_percent),
    ("GPUs busy", "gpu_percent", _whole_percent),
    ("the least busy", "gpu_percent_least", _whole_percent),
    ("power of a GPU", "gpu_power_w", "{:.0f} W".format),
]
"""The ranks' memory and the use of CPUs and GPUs."""


def _values(row: Row) -> dict[str, Any]:
    """Return the values of a row by the keys of columns; unknown ones are missing or None."""
    found = {**row.shares, **_row_data(row), "seconds": 3600 * row.hours}
    if "exposed_s" not in row.details:
        found.pop("communication", None)
    if row.repeats > 1:
        found["efficiency_range"] = (row.low, row.high)
    low, high = (row.details.get(f"communication_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        found["communication_range"] = (max(low, 0.0), max(high, 0.0))
    return found


def digits(number: float) -> str:
    """Format four digits or more without an exponent, so that rows can be compared."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}".rstrip(".")


def as_markdown(
    judged: Sequence[Judged], notes: Sequence[str] = (), loaders: Sequence[LoaderAdvice] = ()
) -> str:
    """Return one section per series, after an overview table if there are several."""
    lines = ["# Scaling"]
    for advice in loaders:
        lines += ["", str(advice)]
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
        cost = f"{digits(row.gpu_hours)} GPU-hours"
        if row.cost is not None:
            cost = money(digits(row.cost), series.currency)
        speed = format_duration(3600 * row.hours)
        if series.work_samples == series.work_size:
            speed = f"{digits(row.rate)} samples/s"
        cells = (
            _name(series),
            str(verdict.world_size) if len(comparison.rows) > 1 else "measure another",
            speed,
            f"{row.efficiency:.1%}",
            f"{cost} for {series.work}",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _name(series: Measured) -> str:
    return " ".join(series.name.split())


def _section(one: Judged) -> Iterator[str]:
    comparison, verdict = one
    series = comparison.series
    yield f"## {_name(series)}"
    yield ""
    yield headline(comparison, verdict)
    yield ""
    trained = dict.fromkeys(parameters_text(row.details) for row in comparison.rows)
    reasons = (*filter(None, trained), *verdict.reasons, *series.notes)
    yield from (f"- {reason}" for reason in reasons)
    yield ""
    rows = [_values(row) for row in comparison.rows]
    for columns in (results_columns(series), _STEP, _MACHINE):
        yield from _table(rows, columns)


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


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> Iterator[str]:
    """Yield one row per world size and an empty line; nothing if no column has a value."""
    shown = {
        head: ["" if row.get(key) is None else form(row[key]) for row in rows]
        for head, key, form in columns
    }
    # Omit a column that has no value for any world size.
    shown = {_cell(head): cells for head, cells in shown.items() if any(cells)}
    if not shown:
        return
    yield f"| world size | {' | '.join(shown)} |"
    yield "|" + "---:|" * (1 + len(shown))
    for row, *cells in zip(rows, *shown.values(), strict=True):
        yield f"| {row['world_size']} | {' | '.join(cells)} |"
    yield ""


def as_data(
    judged: Sequence[Judged], notes: Sequence[str] = (), loaders: Sequence[LoaderAdvice] = ()
) -> dict[str, Any]:
    """Return the content of the page as JSON values; an unknown number is null."""
    return {
        "format": 1,
        "kind": "hpctk.scaling.analysis",
        "series": [_data(*one) for one in judged],
        "loaders": [asdict(one) for one in loaders],
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


_CURVE_POINTS = 40


def scaling_svg(comparisons: Sequence[Comparison], minimum: float) -> str:
    """Draw two plots: speed-up with the ideal line, and efficiency with the target.

    Bars are the range over pairs of repeats. A dashed curve is the fitted law, if there are at
    least three world sizes.
    """
    rows = [row for one in comparisons for row in one.rows]
    most = max(2.0, *(row.ideal for row in rows))
    # Cut the bars of repeats that differ wildly, or the other points could not be told apart.
    top = max(most, *(max(row.speedup, min(row.high * row.ideal, 2 * most)) for row in rows))
    least = 0.7 * min(1.0, *(max(row.speedup, 0.01) for row in rows))
    highest = max(1.1, *(max(row.efficiency, min(row.high, 2.0)) for row in rows))
    powers = range(math.ceil(math.log2(least)), math.floor(math.log2(top)) + 1)
    step = 0.2 * math.ceil(highest / 2.2)
    shares = [step * number for number in range(int(highest / step + 1e-9) + 1)]
    bases = {one.rows[0].world_size for one in comparisons}
    unit = bases.pop() if len(bases) == 1 else None
    speedup = Plot(
        x="ranks" if unit else "ranks, as a multiple of each smallest world size",
        y="speed-up",
        across=Axis(1.0, most, log=True),
        up=Axis(least, top, log=True),
        columns=[(one, f"{one * (unit or 1):g}") for one in sorted({row.ideal for row in rows})],
        rows=[(2.0**power, f"{2.0**power:g}") for power in powers],
        series=[*_lines(comparisons, speed=True), _level("ideal", [(1.0, 1.0), (most, most)])],
    )
    target = _level(f"target: {minimum:.0%}", [(1.0, minimum), (most, minimum)])
    share = replace(
        speedup,
        y="efficiency",
        up=Axis(0.0, math.ceil(10 * highest) / 10),
        rows=[(share, f"{share:.0%}") for share in shares],
        series=[*_lines(comparisons, speed=False), target],
    )
    last = [(_name(one.series), one.rows[-1]) for one in comparisons]
    said = (f"{name}: efficiency {row.efficiency:.1%} at {row.world_size}" for name, row in last)
    title = "Speed-up and efficiency"
    return plots(title, "; ".join(said), [speedup, share], beside=2).svg


def _level(name: str, points: list[tuple[float, float]]) -> Series:
    return Series(name=name, points=points, colour=DIM, style=DOTTED)


def _lines(comparisons: Sequence[Comparison], *, speed: bool) -> Iterator[Series]:
    """The measured points of each series, the bars of their repeats, and the fitted law."""
    for number, one in enumerate(comparisons):
        colour, name = COLOURS[number % len(COLOURS)], _name(one.series)
        style = "" if number < len(COLOURS) else f'stroke-width="2" {DOTTED}'
        points = [(row.ideal, row.speedup if speed else row.efficiency) for row in one.rows]
        yield Series(name=name, points=points, colour=colour, style=style, dotted=True)
        for row in one.rows:
            if row.repeats > 1:
                scale = row.ideal if speed else 1.0
                ends = [(row.ideal, row.high * scale), (row.ideal, row.low * scale)]
                yield Series(name="", points=ends, colour=colour, style='stroke-width="1"')
        serial = one.serial
        if serial is not None and serial.low is not None:
            base, last = one.rows[0].world_size, one.rows[-1].ideal
            law = serial.speedup if speed else serial.efficiency
            steps = [last ** (step / _CURVE_POINTS) for step in range(_CURVE_POINTS + 1)]
            curve = [(ideal, law(base * ideal, base)) for ideal in steps]
            said = f"{serial.share:.1%} serial ({serial.low:.1%} to {serial.high:.1%})"
            name = f"{name}, {serial.name}: {said}"
            yield Series(name=name, points=curve, colour=colour, style=DASHED)
