"""Gathered rows, read back from a file."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.tables import read_parquet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.gather import Row
    from hpc_toolkit.queue.items import Item

_OWN = ("state", "error", "attempts", "seconds", "worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Rows to be verified."""

    rows: list[Row]
    """With ``item``, ``state``, ``value`` and ``error`` at least."""
    key: Callable[[Item], str]
    """Equal for an item and the item of its row."""


def read_results(path: Path) -> Results:
    """Read what ``hpctk gather`` wrote: .jsonl, .csv or .parquet.

    Raises:
        ConfigError: another ending, or Parquet without pyarrow.
        RunError: the file is not there, or holds no rows of ours.
    """
    readers = {".jsonl": _read_lines, ".csv": _read_csv, ".parquet": _read_columns}
    if path.suffix not in readers:
        message = f"{path}: results are .jsonl, .csv or .parquet, a run, or a snapshot in .json"
        raise ConfigError(message, hint="'hpctk gather RUN -o FILE.jsonl' writes them")
    try:
        return readers[path.suffix](path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        message = f"{path} holds no gathered rows: {what}"
        raise RunError(message, hint="'hpctk gather RUN -o FILE' writes them") from error


def _read_lines(path: Path) -> Results:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return Results(rows=[_checked(row) for row in rows], key=plain_key)


def _checked(row: Row) -> Row:
    return {"item": dict(row["item"]), **{key: row[key] for key in ("state", "value", "error")}}


def plain_key(item: Item) -> str:
    """Of items as they were given."""
    return json.dumps(item, sort_keys=True)


def _read_csv(path: Path) -> Results:
    with path.open(newline="", encoding="utf-8") as file:
        table = [_row(cells, _number) for cells in csv.DictReader(file)]
    return Results(rows=table, key=lambda item: _flat_key(item, str))


def _read_columns(path: Path) -> Results:
    columns = read_parquet(path)
    count = len(next(iter(columns.values()), []))
    table = [
        _row({name: cells[index] for name, cells in columns.items()}, lambda cell: cell)
        for index in range(count)
    ]
    return Results(rows=table, key=lambda item: _flat_key(item, _plain))


def _row(cells: dict[str, Any], parse: Callable[[Any], Any]) -> Row:
    """A row of a table with a column per key, as :mod:`hpc_toolkit.tables` writes it."""
    # Where an item has a key of this name, ours has another in that item's row alone.
    own = {
        key: f"hpctk.{key}" if cells.get(f"hpctk.{key}") not in (None, "") else key for key in _OWN
    }
    if cells[own["state"]] == "done" and "hpctk.error" in cells:
        own["error"] = "hpctk.error"
    item, value = {}, {}
    for name, cell in cells.items():
        if name.startswith(("value.", "hpctk.value.")):
            if cell not in (None, ""):
                value[name.partition("value.")[2]] = parse(cell)
        elif name not in own.values() and not name.startswith("hpctk."):
            item[name] = cell
    state = cells[own["state"]]
    error = cells[own["error"]] or None
    return {
        "item": item,
        "state": state,
        "value": value if state == "done" else None,
        "error": error,
    }


def _number(text: str) -> Any:
    """What a cell of a CSV file holds, as JSON where it is some."""
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _plain(cell: Any) -> str:
    """Parquet gives the whole numbers of a column of floats as floats."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _flat_key(item: Item, text: Callable[[Any], str]) -> str:
    """A table tells a missing cell and an empty one not apart, and holds lists as JSON."""
    cells = {
        key: text(cell) if isinstance(cell, str | int | float) else json.dumps(cell)
        for key, cell in item.items()
        if cell not in (None, "")
    }
    return json.dumps(cells, sort_keys=True)
