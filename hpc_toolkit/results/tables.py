"""Write rows to a file, and read them back: JSON lines, CSV, npz or Parquet, by its suffix."""

from __future__ import annotations

import csv
import io
import json
import math
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.rundir.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    from hpc_toolkit.queue.items import Item
    from hpc_toolkit.results.gather import Row


OWN = ("state", "error", "attempts", "seconds", "worker")
"""Columns that describe a row, in this order, between the columns of its item and of its value."""

_KINDS: dict[str, tuple[type, ...]] = {
    "item": (dict,),
    "state": (str,),
    "value": (dict, type(None)),
    "error": (str, type(None)),
    "attempts": (int,),
    "seconds": (int, float),
    "worker": (str,),
}


def row_fault(row: object) -> str:
    """What is wrong with a gathered row, such as "it has no 'state'"; "" if it is valid."""
    if not isinstance(row, dict):
        return "it is not a JSON object"
    for key, kinds in _KINDS.items():
        if key not in row:
            return f"it has no {key!r}"
        if not isinstance(row[key], kinds):
            return f"its {key!r} is {type(row[key]).__name__}"
    if row["state"] not in ("done", "failed") or (row["state"] == "done") != (
        row["value"] is not None
    ):
        return "its 'state' is neither 'done' with a value nor 'failed' without one"
    return ""


def check_rows(rows: list[Row]) -> None:
    """Refuse rows of a damaged table.

    Raises:
        RunError: a row is not valid.
    """
    for number, row in enumerate(rows):
        if fault := row_fault(row):
            message = f"row {number} of the published table is damaged: {fault}"
            hint = "'hpctk doctor RUN' names its file and line; restore that from a backup"
            raise RunError(message, hint=hint)


def json_lines(rows: list[Row]) -> Iterator[bytes]:
    """Encode each row as one line of JSON."""
    # Made once: ``json.dumps`` with options makes an encoder for each row.
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    for row in rows:
        yield encode(row).encode() + b"\n"


def write_table(path: Path, rows: list[Row]) -> None:
    """Write rows in the format of the file's suffix; the file is replaced atomically.

    CSV, npz and Parquet have a column per key: first the items' keys, then :data:`OWN`, then the
    values' keys with the prefix ``value.``. A column of the last two kinds gets the prefix
    ``hpctk.`` if any item has a key of the same name. Values that are neither numbers nor text are
    written as JSON. An npz holds one array per column, float64 (NaN if a row lacks it) or text; it
    is read without pickle.

    Raises:
        ConfigError: the suffix is unknown, or a package that the format needs is not installed.
    """
    writer = writer_for(path)
    replace_file(path, writer(rows))


def writer_for(path: Path) -> Callable[[list[Row]], Iterator[bytes]]:
    """The writer for a file's suffix.

    Raises:
        ConfigError: the suffix is unknown.
    """
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint=near_miss(path.suffix, list(_WRITERS)))
    return writer


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    try:
        keys = dict.fromkeys(key for row in rows for key in row["item"])
        columns = {key: [_cell(row["item"].get(key)) for row in rows] for key in keys}
        for key in OWN:
            columns[_beside(key, keys)] = [row[key] for row in rows]
        for key in dict.fromkeys(key for row in rows for key in row["value"] or ()):
            cells = [_cell((row["value"] or {}).get(key)) for row in rows]
            columns[_beside(f"value.{key}", keys)] = cells
    except (AttributeError, KeyError, TypeError):
        check_rows(rows)
        raise
    return columns


def _beside(name: str, keys: Container[str]) -> str:
    """A column's name, prefixed until it differs from all of the items' keys."""
    while name in keys:
        name = f"hpctk.{name}"
    return name


def _csv(rows: list[Row]) -> Iterator[bytes]:
    columns = _columns(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for values in zip(*columns.values(), strict=True):
        writer.writerow(values)
    yield text.getvalue().encode()


def _is_float(value: Any) -> bool:
    """Whether a value is a finite number that fits into a float; an integer may be too large."""
    try:
        return isinstance(value, int | float) and math.isfinite(float(value))
    except OverflowError:
        return False


def _npz(rows: list[Row]) -> Iterator[bytes]:
    import numpy as np

    arrays = {}
    for name, values in _columns(rows).items():
        if all(value is None or _is_float(value) for value in values):
            arrays[name] = np.array([np.nan if v is None else v for v in values], dtype=np.float64)
        else:
            arrays[name] = np.array(["" if value is None else str(value) for value in values])
    buffer = io.BytesIO()
    # np.savez takes names as keyword arguments, so a column could not be called "file".
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    yield buffer.getvalue()


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file by name; an empty cell is None.

    Raises:
        ConfigError: pyarrow is not installed.
        OSError, ValueError: the file is missing, or not a Parquet file.
    """
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "reading Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[parquet]'") from error
    columns: dict[str, list[Any]] = pq.read_table(path).to_pydict()
    return columns


def _parquet(rows: list[Row]) -> Iterator[bytes]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "writing Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint="pip install 'hpc-toolkit[parquet]'") from error
    buffer = io.BytesIO()
    pq.write_table(pa.table(_columns(rows)), buffer)
    yield buffer.getvalue()


_WRITERS: dict[str, Callable[[list[Row]], Iterator[bytes]]] = {
    ".jsonl": json_lines,
    ".csv": _csv,
    ".npz": _npz,
    ".parquet": _parquet,
}


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
    """Rows of a table with a column per key, as :func:`write_table` writes it.

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
