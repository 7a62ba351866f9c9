"""The trace of a run: a table with one row for each attempt at an item."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.results.columnfiles import parquet_of
from hpc_toolkit.results.records import Attempt
from hpc_toolkit.results.tables import beside, cell, csv_lines, json_array, json_lines
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import shown_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hpc_toolkit.results.history import History
    from hpc_toolkit.results.tables import Row

OWN = (
    *("number", "stage", "unit", "generation", "attempt", "outcome"),
    *("begin", "end", "seconds", "worker", "host", "job", "error"),
)
"""Columns that describe an attempt, in this order, after the columns of its item."""

_AT_ONCE = 512


def trace_rows(history: History, stage: str | None = None) -> Iterator[Row]:
    """One row per attempt, in the order in which attempts ended; ``stage``: only those of a stage.

    ``history`` must be up to date, and nothing may have been read from it yet.
    """
    stages = history.view.stages

    @lru_cache(maxsize=2 * len(history.view.readers))  # workers run their units side by side
    def lines_of(stage: str, entry: int, unit: str) -> list[bytes]:
        """The JSON of a unit's items; empty if its segment is damaged."""
        with suppress(RunError, OSError):
            return stages[stage].log.segments[entry].lines(stages[stage].unit(unit))
        return []

    for record in history.work():
        if isinstance(record, Attempt) and stage in (None, record.stage):
            presence = history.presences.get(record.worker)
            seconds = record.seconds
            lines = lines_of(record.stage, record.entry, record.unit)
            place = record.position - stages[record.stage].unit(record.unit).first
            yield {
                "item": json.loads(lines[place]) if lines else {},
                "number": record.item,
                "stage": record.stage,
                "unit": record.unit,
                "generation": record.generation,
                "attempt": record.number,
                "outcome": record.outcome,
                "begin": record.begin,
                "end": record.end,
                "seconds": seconds if seconds is None else round(seconds, 6),
                "worker": record.worker,
                "host": record.host,
                "job": presence.job if presence is not None else None,
                "error": record.error,
            }


def write_trace(path: Path, history: History, stage: str | None = None) -> int:
    """Write :func:`trace_rows` in the format of the file's suffix; return their number.

    The file is replaced atomically. CSV and Parquet have a column for each key of the items and
    then :data:`OWN`, with the prefix ``hpctk.`` if an item has a key of the same name. Raises
    ConfigError: the suffix is unknown, or Parquet needs a package that is not installed.
    """
    write, count = trace_writer(path), 0

    def rows() -> Iterator[Row]:
        nonlocal count
        for row in trace_rows(history, stage):
            count += 1
            yield row

    replace_file(path, write(rows(), _names(history, stage)))
    return count


def trace_writer(path: Path) -> Callable[[Iterator[Row], Iterator[str]], Iterator[bytes]]:
    """The writer for a file's suffix. Raises ConfigError: the suffix is unknown."""
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        message = f"{path}: unknown format {path.suffix!r} of a trace"
        hint = near_miss(path.suffix, list(_WRITERS)) or f"use {', '.join(_WRITERS)}"
        raise ConfigError(message, hint=hint)
    return writer


def _names(history: History, stage: str | None) -> Iterator[str]:
    """The keys of all items, in the order in which they first occur."""
    keys: dict[str, None] = {}
    for view in history.view.stages.values():
        for segment in view.log.segments.values() if stage in (None, view.spec.name) else ():
            with suppress(RunError, OSError):  # of a damaged segment the keys before the damage
                for line in segment.items():
                    keys |= dict.fromkeys(shown_item(json.loads(line)))
    yield from keys


def _cells(row: Row, names: list[str]) -> list[Any]:
    return [*(cell(row["item"].get(name)) for name in names), *(row[key] for key in OWN)]


def _csv(rows: Iterator[Row], names: Iterator[str]) -> Iterator[bytes]:
    keys = list(names)
    yield csv_lines([[*keys, *(beside(key, keys) for key in OWN)]])
    while some := [_cells(row, keys) for row in islice(rows, _AT_ONCE)]:
        yield csv_lines(some)


def _parquet(rows: Iterator[Row], names: Iterator[str]) -> Iterator[bytes]:
    keys = list(names)
    columns: dict[str, list[Any]] = {name: [] for name in keys}
    columns |= {beside(key, keys): [] for key in OWN}
    for row in rows:
        for column, value in zip(columns.values(), _cells(row, keys), strict=True):
            column.append(value)
    yield parquet_of(columns)


_WRITERS: dict[str, Callable[[Iterator[Row], Iterator[str]], Iterator[bytes]]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": _csv,
    ".parquet": _parquet,
}
