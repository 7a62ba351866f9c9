"""Write rows as JSON lines, CSV or Parquet, by the file's suffix."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.rundir.layout import shown_item
from hpc_toolkit.rundir.valuefiles import WHOLE, Values, value_columns
from hpc_toolkit.rundir.values import natural
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.jsonlines import (
    AT_ONCE,
    batches,
    decode_each,
    encode_each,
    without_collections,
)

Row = dict[str, Any]
"""One gathered row: an item, its value or error, and how it came about."""

OWN = ("state", "error", "attempts", "seconds", "worker")
"""Columns that describe a row, in this order, between the columns of its item and of its value."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one stage, read again each time that they are used: a file holds them."""

    lines: Callable[[], Iterator[bytes]]
    """Reads the rows, in the order in which the items were given: JSON, one or more lines at once.
    """
    count: int
    failed: int
    """How many of them are of failed items."""
    published: bool
    """Whether the rows are a published table's; provisional rows may still change."""

    def __iter__(self) -> Iterator[Row]:
        for some in batches(line for lines in self.lines() for line in lines.splitlines()):
            yield from decode_each(some)

    def __len__(self) -> int:
        return self.count

    @property
    def rows(self) -> list[Row]:
        return list(self)


_KINDS: dict[str, tuple[type, ...]] = {
    "item": (dict,),
    "state": (str,),
    "value": (object,),
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
    if row["state"] not in ("done", "failed") or (
        row["state"] == "failed" and row["value"] is not None
    ):
        return "its 'state' is neither 'done' nor 'failed' without a value"
    return ""


def check_rows(rows: Iterable[Row]) -> None:
    """Refuse rows of a damaged table. Raises RunError: a row is not valid."""
    for number, row in enumerate(rows):
        if fault := row_fault(row):
            message = f"row {number} of the published table is damaged: {fault}"
            hint = "'hpctk doctor RUN' names its file and line; restore the file from a backup"
            raise RunError(message, hint=hint)


def json_lines(rows: Iterable[Row], _more: object = None) -> Iterator[bytes]:
    """Each row as a line of JSON, one or more lines at once."""
    if isinstance(rows, Table):
        yield from rows.lines()
        return
    for some in batches(rows):
        yield b"".join([line + b"\n" for line in encode_each(some)])


@without_collections()
def write_table(path: Path, rows: Iterable[Row], values: Values | None = None) -> None:
    """Write rows in the format of the file's suffix; the file is replaced atomically.

    ``rows`` may be read twice. CSV and Parquet have a column per key: first the items' keys, then
    :data:`OWN` or the ``own`` of the rows, then the values' keys with the prefix ``value.``. A
    column after the items' keys gets the prefix ``hpctk.`` if any item has a key of the same name.
    A value that is not a dict is the column ``value``. CSV has JSON for what is neither number nor
    text.
    Parquet has lists, dates and numbers of their types, and objects as JSON.
    ``values`` reads arrays that are in value files; without it they stay as they are shown.

    Raises ConfigError: the suffix is unknown, or a package that the format needs is not installed.
    """
    try:
        replace_file(path, writer_for(path)(rows, values))
    except _NewColumnError:
        replace_file(path, _csv(rows, known=rows))


def writer_for(path: Path) -> _Writer:
    """The writer for a file's suffix. Raises ConfigError: the suffix is unknown."""
    writer = _WRITERS.get(path.suffix)
    if writer is None:
        message = f"{path}: unknown format {path.suffix!r}"
        raise ConfigError(message, hint=near_miss(path.suffix, list(_WRITERS)))
    return writer


_PLAIN = frozenset((str, int, float, bool, type(None)))


def cell(value: Any) -> Any:
    """A value as one cell of a table: numbers and text as they are, others as JSON."""
    return value if isinstance(value, str | int | float | None) else json.dumps(value)


def columns_of(rows: Iterable[Row], *forms: Any) -> dict[str, list[Any]]:
    """A list of cells per column, as :func:`write_table` names them. RunError for damaged rows."""
    try:
        return _columns(*_cells(rows, islice(rows, AT_ONCE), *forms))
    except _NewColumnError:
        return _columns(*_cells(rows, rows, *forms))


def _columns(names: list[str], cells: Iterator[list[Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for some in batches(cells):
        for column, values in zip(columns.values(), zip(*some, strict=True), strict=True):
            column.extend(values)
    return columns


def _as_cells(found: list[Any]) -> list[Any]:
    # One look at all types takes less time than one at each cell.
    return found if _PLAIN.issuperset(map(type, found)) else [*map(cell, found)]


def _cells(
    rows: Iterable[Row],
    known: Iterable[Row],
    read: Callable[[Row], dict[Any, Any]] = value_columns,
    form: Callable[[list[Any]], list[Any]] = _as_cells,
) -> tuple[list[str], Iterator[list[Any]]]:
    """The columns' names, as the ``known`` rows have them, and the cells of each row.

    Raises RunError: damaged rows; _NewColumnError: a row has a key that the known ones do not have.
    """
    items: dict[str, None] = {}
    values: dict[Any, None] = {}
    own = getattr(rows, "own", OWN)
    with _named_damage(rows):
        for row in known:
            value = value_columns(row) if "value" in row else {}  # an attempt has none
            for keys, given in ((items, shown_item(row["item"])), (values, value)):
                if not given.keys() <= keys.keys():
                    keys.update(dict.fromkeys(given))

    def cells() -> Iterator[list[Any]]:
        with _named_damage(rows):
            for row in rows:
                item, value = shown_item(row["item"]), row.get("value", {})
                if type(value) is not dict or "types" in row:
                    value = read(row)
                if not (item.keys() <= items.keys() and value.keys() <= values.keys()):
                    raise _NewColumnError
                found = [
                    *map(item.get, items),
                    *map(row.__getitem__, own),
                    *map(value.get, values),
                ]
                yield form(found)

    after = [*own, *("value" if key is WHOLE else f"value.{key}" for key in values)]
    return [*items, *(beside(name, items) for name in after)], cells()


class _NewColumnError(Exception):
    """A row has a key that the rows before it did not have."""


@contextmanager
def _named_damage(rows: Iterable[Row]) -> Iterator[None]:
    """Raise the RunError of the first damaged row if the block fails because of one."""
    try:
        yield
    except (AttributeError, KeyError, TypeError):
        check_rows(rows)
        raise


def beside(name: str, keys: Container[str]) -> str:
    """A column's name, prefixed until it differs from all of the items' keys."""
    while name in keys:
        name = f"hpctk.{name}"
    return name


def json_array(rows: Iterable[Row], _more: object = None) -> Iterator[bytes]:
    """One array, with one row on each line."""
    before = b"[\n"
    for lines in json_lines(rows):
        yield before + lines.rstrip().replace(b"\n", b",\n")
        before = b",\n"
    yield b"[]\n" if before == b"[\n" else b"\n]\n"


def _csv(
    rows: Iterable[Row], _values: Values | None = None, known: Iterable[Row] | None = None
) -> Iterator[bytes]:
    # The first rows have every key nearly always; if not, all rows are read twice.
    names, cells = _cells(rows, islice(rows, AT_ONCE) if known is None else known)
    yield csv_lines([names])
    yield from map(csv_lines, batches(cells))


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


_MOST_DEPTH = 20


def _text(value: Any) -> str | None:
    """A cell of a column of text."""
    shown = natural(value)
    if isinstance(shown, str | None):
        return shown if shown is not None or value is None else str(value)  # nan, inf
    return str(shown) if isinstance(shown, int | float) else json.dumps(shown)


def _parquet(rows: Iterable[Row], values: Values | None) -> Iterator[bytes]:
    """Parquet, in which a column whose values have no common type becomes text.

    Raises ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "writing Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="parquet")) from error

    buffer = io.BytesIO()
    # With lists, and with numbers, arrays and dates of their types.
    read = value_columns if values is None else values.columns
    columns = columns_of(rows, read, lambda row: row)
    table = pa.table({_utf8(name): _arrow(name, some) for name, some in columns.items()})
    pq.write_table(table, buffer)
    yield buffer.getvalue()


def _arrow(name: str, values: list[Any]) -> Any:
    import pyarrow as pa

    # The type of the errors must not depend on whether there is one.
    kind = pa.string() if name.removeprefix("hpctk.") == "error" else None
    present = [one for one in values if one is not None]
    shapes = {(one.dtype, one.ndim) if hasattr(one, "ndim") else None for one in present}
    if len(shapes) == 1 and (shape := shapes.pop()) is not None and shape[0].kind in "biuf":
        kind = pa.from_numpy_dtype(shape[0])
        for _ in range(shape[1]):
            kind = pa.list_(kind)
        values = [one if one is None else one.tolist() for one in values]
    else:  # Arrow takes arrays of one dimension only
        values = [natural(one) if hasattr(one, "ndim") else one for one in values]
    try:
        if any(map(_has_object, values)) or len(set(map(_zoned, values)) - {None}) > 1:
            raise ValueError
        return pa.array(values, kind)
    # The errors of Arrow are subclasses of these.
    except (ValueError, TypeError, NotImplementedError, OverflowError):
        texts = map(_text, values)
        return pa.array([text if text is None else _utf8(text) for text in texts], pa.string())


def _has_object(value: Any, depth: int = 0) -> bool:
    """Whether Arrow would add keys to objects, or refuse lists that are nested so deeply."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    return depth > _MOST_DEPTH or any(_has_object(one, depth + 1) for one in value)


def _zoned(value: Any) -> bool | None:
    """Whether a time has a zone: Arrow would drop it where another has none."""
    return value.tzinfo is not None if hasattr(value, "tzinfo") else None


def _utf8(text: str) -> str:
    """Text that UTF-8 can encode: JSON may contain one half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


_Writer = Callable[[Iterable[Row], Values | None], Iterator[bytes]]
_WRITERS: dict[str, _Writer] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": _csv,
    ".parquet": _parquet,
}
