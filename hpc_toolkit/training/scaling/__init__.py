"""Compare the world sizes of a training by speed, efficiency and cost; a table, an advice, JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hpc_toolkit.system.quantities import HOUR_S, format_size
from hpc_toolkit.training.scaling.recorder import Record, identity, is_number, read_source

SAMPLES = 1000
"""Samples to which times, GPU-hours and costs refer."""
GOOD = 0.9
"""Efficiency from which on more ranks cost hardly more."""
FAIR = 0.85
"""Lowest efficiency that is advised unless the user gives another one."""
POSSIBLE = 1.01
"""Highest efficiency that rounding can explain; more ranks cannot explain a higher one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One world size compared with the smallest one. None: unknown."""

    world_size: int
    repeats: int
    rate_per_s: float
    """Median over repeats, in samples per second."""
    tokens_per_s: float
    speedup: float
    """The rate divided by the rate of the smallest world size."""
    efficiency: float
    """Speed-up divided by the ideal one; above 1 it is more than the ranks can explain."""
    low: float
    """Lowest efficiency of any pair of repeats; not a confidence interval."""
    high: float
    """Highest efficiency of any pair of repeats."""
    seconds: float
    """Time for 1,000 samples."""
    gpu_hours: float
    premium: float
    """Extra cost of the samples, as a share of its cost on the smallest world size."""
    cost_per_1000: float | None
    """Cost of 1,000 samples."""
    step_median_s: float | None
    step_p90_s: float | None
    rss_bytes: float | None

    def is_unsure(self, minimum: float) -> bool:
        """Whether some pairs of repeats are below the wanted efficiency, and others are not."""
        return self.repeats > 1 and self.low < minimum <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same training on several world sizes."""

    name: str
    law: str
    """``weak`` if each rank brings a fixed batch, ``strong`` if all ranks share it."""
    minimum: float
    """The wanted efficiency."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Facts that a reader must know, such as ranks that shared CPUs."""

    @property
    def below(self) -> tuple[int, ...]:
        """World sizes whose efficiency is below the wanted one."""
        return tuple(one.world_size for one in self.rows if one.efficiency < self.minimum)

    @property
    def advised(self) -> Row:
        """The largest world size up to which every efficiency is at least the wanted one."""
        found = self.rows[0]
        for row in self.rows:
            if row.efficiency < self.minimum:
                break
            found = row
        return found

    @property
    def headline(self) -> str:
        last = self.rows[-1]
        if len(self.rows) == 1:
            return f"Measure another world size: {last.world_size} alone says nothing of scaling"
        below = " or ".join(map(str, self.below))
        advice = f"Use {self.advised.world_size}{', not ' * bool(below)}{below}"
        if any(one.is_unsure(self.minimum) for one in self.rows[1:]):
            advice += ", but measure again: repeats do not agree"
        word = "poor"
        if last.efficiency >= self.minimum:
            word = "good" if last.efficiency >= GOOD else "fair"
        doubt = ""
        if any(one.efficiency > POSSIBLE for one in self.rows):
            doubt = "; more than the ranks explain, see below"
        return (
            f"{advice} ({word} on {last.world_size}: {last.efficiency:.1%} efficiency, "
            f"at least {self.minimum:.0%} wanted{doubt})"
        )

    def reasons(self) -> Iterator[str]:
        """Sentences with the numbers that decided, and doubts."""
        first, advised = self.rows[0], self.advised
        if advised is not first:
            yield (
                f"on {advised.world_size} it is {advised.speedup:.2f} times as fast as on "
                f"{first.world_size}, at {advised.efficiency:.1%} of the ideal and "
                f"{advised.premium:+.1%} cost"
            )
        worse = next((one for one in self.rows if one.world_size > advised.world_size), None)
        if worse is not None:
            yield (
                f"on {worse.world_size} the efficiency is {worse.efficiency:.1%}, below "
                f"{self.minimum:.0%}: the same work costs {worse.premium:+.1%}"
            )
        for row in self.rows[1:]:
            if row.is_unsure(self.minimum):
                yield (
                    f"on {row.world_size} repeats differ too much to tell: "
                    f"{row.low:.1%} to {row.high:.1%}"
                )
            if row.efficiency > POSSIBLE:
                yield (
                    f"on {row.world_size} the efficiency is {row.efficiency:.1%}, more than the "
                    "ranks explain: caches, rounded numbers, or a smallest world size that was "
                    "disturbed"
                )

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "advice": self.headline,
            "world_size": self.advised.world_size,
            "below": list(self.below),
            "reasons": list(self.reasons()),
        }


def analyze(
    sources: Iterable[Path],
    *,
    price_per_gpu_hour: float | None = None,
    min_efficiency: float | None = None,
) -> list[Comparison]:
    """Analyze directories and files, as :func:`read_source` reads them.

    ``min_efficiency`` is the lowest that is wanted, by default :data:`FAIR`. Raises ConfigError: a
    source cannot be read.
    """
    minimum = FAIR if min_efficiency is None else min_efficiency
    return [
        found
        for path in sources
        for found in compare(read_source(path), price=price_per_gpu_hour, minimum=minimum)
    ]


def compare(
    records: Iterable[Record], *, price: float | None = None, minimum: float = FAIR
) -> list[Comparison]:
    """Return one comparison per training; of two records with one identity, the later one counts.

    ``price`` is that of a rank for an hour.
    """
    # Sorted by content, so that the order of reading changes nothing.
    ordered = sorted(records, key=lambda one: (str(one.get("at")), json.dumps(one)))
    latest = {identity(record): record for record in ordered}
    groups: dict[str, list[Record]] = defaultdict(list)
    for one in sorted(latest):
        groups[one[0]].append(latest[one])
    names = _names(groups)
    found = []
    for key, group in groups.items():
        sizes = sorted({one["world_size"] for one in group})
        points = [[one for one in group if one["world_size"] == size] for size in sizes]
        rows = tuple(_row(point, points[0], price) for point in points)
        found.append(
            Comparison(
                name=names[key],
                law="weak" if group[0]["settings"].get("weak") else "strong",
                minimum=minimum,
                rows=rows,
                notes=tuple(_notes(group)),
            )
        )
    return found


def _row(records: list[Record], base: list[Record], price: float | None) -> Row:
    rates, first = (sorted(one["samples_per_s"] for one in some) for some in (records, base))
    size = records[0]["world_size"]
    ideal, rate = size / base[0]["world_size"], median(rates)
    speedup, seconds = rate / median(first), SAMPLES / rate
    is_base = records is base
    return Row(
        world_size=size,
        repeats=len(rates),
        rate_per_s=rate,
        tokens_per_s=median(one["tokens_per_s"] for one in records),
        speedup=speedup,
        efficiency=speedup / ideal,
        # The smallest world size is compared with itself and has no spread.
        low=1.0 if is_base else rates[0] / first[-1] / ideal,
        high=1.0 if is_base else rates[-1] / first[0] / ideal,
        seconds=seconds,
        gpu_hours=size * seconds / HOUR_S,
        premium=ideal / speedup - 1,
        cost_per_1000=None if price is None else price * size * seconds / HOUR_S,
        step_median_s=_median(records, "step_s", "median"),
        step_p90_s=_median(records, "step_s", "p90"),
        rss_bytes=_median(records, "memory", "rss"),
    )


def _median(records: list[Record], group: str, key: str) -> float | None:
    values: list[Any] = [one[group].get(key) for one in records]
    known = list(filter(is_number, values))
    return float(median(known)) if known else None


def _names(groups: Mapping[str, list[Record]]) -> dict[str, str]:
    """Name each training by the settings that differ; a single one by its script."""
    settings = {key: group[0]["settings"] for key, group in groups.items()}
    keys = sorted({key for one in settings.values() for key in one})
    differing = [
        key for key in keys if len({json.dumps(one.get(key)) for one in settings.values()}) > 1
    ]
    return {
        key: ", ".join(f"{name}={one.get(name)}" for name in differing)
        or str(one.get("model", "training"))
        for key, one in settings.items()
    }


def _notes(records: list[Record]) -> Iterator[str]:
    devices = sorted({str(one["machine"].get("device", "none")) for one in records})
    if devices == ["cpu"]:
        yield "the ranks are processes on CPUs: a GPU-hour here is an hour of one of them"
    if len(devices) > 1:
        yield f"measured on several kinds of device: {', '.join(devices)}"
    shared = {
        (one["world_size"], one["machine"]["cpus"])
        for one in records
        if one["machine"].get("device") == "cpu"
        and one["world_size"] / max(1, one["nodes"]) > one["machine"].get("cpus", 10**9)
    }
    for size, cpus in sorted(shared):
        yield f"{size} ranks shared {cpus} CPUs of a node: they had to take turns"


def as_json(found: Sequence[Comparison]) -> str:
    series = [one.to_json() for one in found]
    record = {"format": 1, "kind": "hpctk.scaling.analysis", "series": series}
    return json.dumps(record, allow_nan=False) + "\n"


def as_markdown(found: Sequence[Comparison]) -> str:
    """Return one section per training."""
    parts = ["# Scaling"]
    for one in found:
        advice, mark, why = one.headline.partition(" (")
        parts += [f"## {' '.join(one.name.split())}", f"**{advice}**{mark}{why}"]
        parts.append("\n".join(f"- {text}" for text in (*one.reasons(), *one.notes)))
        parts.append(_table(one))
    return "\n\n".join(filter(None, parts)) + "\n"


def digits(number: float) -> str:
    """Format four digits or more without an exponent, so that rows can be compared."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:#.4g}".rstrip(".")


def _milliseconds(seconds: float) -> str:
    # Whole milliseconds are too coarse for the steps of small models.
    return f"{1000 * seconds:.4g} ms"


def _table(one: Comparison) -> str:
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("samples/s", "rate_per_s", digits),
        ("tokens/s", "tokens_per_s", digits),
        ("speed-up", "speedup", "{:.2f}".format),
        ("efficiency", "efficiency", "{:.1%}".format),
        ("its spread", "spread", str),
        (f"GPU-hours of {SAMPLES:,} samples", "gpu_hours", digits),
        ("premium", "premium", "{:+.1%}".format),
        ("cost per 1,000 samples", "cost_per_1000", digits),
        ("step, median", "step_median_s", _milliseconds),
        ("p90", "step_p90_s", _milliseconds),
        ("memory of rank 0", "rss_bytes", lambda size: format_size(round(size))),
    ]
    rows = [asdict(row) for row in one.rows]
    for row in rows:
        row["spread"] = f"{row['low']:.1%} to {row['high']:.1%}" if row["repeats"] > 1 else None
    # A column that has no value for any world size is left out.
    known = [column for column in columns if any(row[column[1]] is not None for row in rows)]
    lines = [f"| world size | {' | '.join(head for head, *_ in known)} |"]
    lines.append("|" + "---:|" * (1 + len(known)))
    for row in rows:
        cells = ["" if row[key] is None else form(row[key]) for _, key, form in known]
        lines.append(f"| {' | '.join([str(row['world_size']), *cells])} |")
    return "\n".join(lines)
