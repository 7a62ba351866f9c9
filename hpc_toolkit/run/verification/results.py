"""Read gathered rows back from a file."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError
from hpc_toolkit.results.tables import OWN, read_parquet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.results.gather import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Rows to verify."""

    rows: list[Row]
    """With ``item``, ``state``, ``value`` and ``error`` at least."""
    key: Callable[[Item], str]
    """Maps an item, and the item of its row, to the same text."""


def read_results(path: Path) -> Results:
    """Read what ``hpctk gather`` wrote: .jsonl, .csv or .parquet.

    Raises:
        ConfigError: another suffix, or Parquet without pyarrow.
        RunError: the file is missing, or contains no gathered rows.
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
    """The key of an item as it was given."""
    return json.dumps(item, sort_keys=True)


def _read_csv(path: Path) -> Results:
    with path.open(newline="", encoding="utf-8") as file:
        head, *lines = (line for line in csv.reader(file) if line)
    for line in lines:
        if len(line) != len(head):
            message = f"{len(line)} cells of {len(head)} in {line}"
            raise ValueError(message)
    rows = _rows(head, lines, _number)
    return Results(rows=rows, key=lambda item: _flat_key(item, str))


def _read_columns(path: Path) -> Results:
    columns = read_parquet(path)
    rows = _rows(list(columns), list(zip(*columns.values(), strict=True)), lambda cell: cell)
    return Results(rows=rows, key=lambda item: _flat_key(item, _plain))


def _rows(
    head: list[str], table: Sequence[Sequence[Any]], parse: Callable[[Any], Any]
) -> list[Row]:
    """Rows of a table with a column per key, as :mod:`hpc_toolkit.results.tables` writes it.

    Columns before the ``state`` column belong to the items, whatever their names.
    """
    own = {key: _own(key, head) for key in OWN}
    state = own["state"]
    if state is None:
        message = "state"
        raise KeyError(message)
    values = {
        place: name.partition("value.")[2]
        for place, name in enumerate(head)
        if place > state and _stem(name).startswith("value.")
    }
    items = {
        place: name
        for place, name in enumerate(head)
        if place not in values and place not in own.values()
    }
    return [_row(cells, own, items, values, parse) for cells in table]


def _stem(name: str) -> str:
    """A column's name without the ``hpctk.`` prefixes that keep it apart from items' keys."""
    while name.startswith("hpctk."):
        name = name.removeprefix("hpctk.")
    return name


def _own(key: str, head: list[str]) -> int | None:
    """The index of a column of :data:`OWN`; an item's column of that name would come before it."""
    return max((place for place, name in enumerate(head) if _stem(name) == key), default=None)


def _row(
    cells: Sequence[Any],
    own: dict[str, int | None],
    items: dict[int, str],
    values: dict[int, str],
    parse: Callable[[Any], Any],
) -> Row:
    told = {key: None if place is None else cells[place] for key, place in own.items()}
    if told["state"] not in ("done", "failed"):
        message = f"the state {told['state']!r} of {list(cells)}"
        raise ValueError(message)
    value = {
        name: parse(cells[place])
        for place, name in values.items()
        if cells[place] not in (None, "")
    }
    return {
        "item": {name: cells[place] for place, name in items.items()},
        "state": told["state"],
        "value": value if told["state"] == "done" else None,
        "error": told["error"] or None,
    }


def _number(text: str) -> Any:
    """The value of a CSV cell: JSON or a number if it is one, else its text."""
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _plain(cell: Any) -> str:
    """A cell as text; Parquet returns the whole numbers of a float column as floats."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _flat_key(item: Item, text: Callable[[Any], str]) -> str:
    """The key of an item in a flat table, where empty cells are missing keys and lists are JSON."""
    cells = {
        key: text(cell) if isinstance(cell, str | int | float) else json.dumps(cell)
        for key, cell in item.items()
        if cell not in (None, "")
    }
    return json.dumps(cells, sort_keys=True)
