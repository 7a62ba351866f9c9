"""Write rows as JSON lines, CSV, npz or Parquet, by the file's suffix; read JSON lines back."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, RunError, near_miss
from hpc_toolkit.rundir.files import replace_file
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.jsonlines import (
    AT_ONCE,
    batches,
    decode_each,
    encode_each,
    without_collections,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator
    from pathlib import Path


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
    """Number of rows."""
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


INHERITED = "inherited_from"
"""Column after :data:`OWN`, only of a search that started from results: their source."""

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


def check_rows(rows: Iterable[Row]) -> None:
    """Refuse rows of a damaged table. Raises RunError: a row is not valid."""
    for number, row in enumerate(rows):
        if fault := row_fault(row):
            message = f"row {number} of the published table is damaged: {fault}"
            hint = "'hpctk doctor RUN' names its file and line; restore the file from a backup"
            raise RunError(message, hint=hint)


def json_lines(rows: Iterable[Row]) -> Iterator[bytes]:
    """Each row as a line of JSON, one or more lines at once."""
    if isinstance(rows, Table):
        yield from rows.lines()
        return
    for some in batches(rows):
        yield b"".join([line + b"\n" for line in encode_each(some)])


@without_collections()
def write_table(path: Path, rows: list[Row] | Table) -> None:
    """Write rows in the format of the file's suffix; the file is replaced atomically.

    CSV, npz and Parquet have a column per key: first the items' keys, then :data:`OWN`, then
    :data:`INHERITED` if any row has it, then the values' keys with the prefix ``value.``. A column
    after the items' keys gets the prefix ``hpctk.`` if any item has a key of the same name. Values
    that are neither numbers nor text are written as JSON. An npz holds one array per column: int64,
    uint64, bool, float64 (NaN if a row lacks it), or text where these would change a number; it
    is read without pickle. Raises ConfigError: the suffix is unknown, or a package that the format
    needs is not installed.
    """
    try:
        replace_file(path, writer_for(path)(rows))
    except _NewColumnError:
        replace_file(path, _csv(rows, rows))


def writer_for(path: Path) -> Callable[[list[Row] | Table], Iterator[bytes]]:
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


def columns_of(rows: list[Row] | Table) -> dict[str, list[Any]]:
    """A list of cells per column, as :func:`write_table` names them. RunError for damaged rows."""
    try:
        return _columns(*_cells(rows, islice(rows, AT_ONCE)))
    except _NewColumnError:
        return _columns(*_cells(rows, rows))


def _columns(names: list[str], cells: Iterator[list[Any]]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for some in batches(cells):
        for column, values in zip(columns.values(), zip(*some, strict=True), strict=True):
            column.extend(values)
    return columns


def _cells(rows: Iterable[Row], known: Iterable[Row]) -> tuple[list[str], Iterator[list[Any]]]:
    """The columns' names, as the ``known`` rows have them, and the cells of each row.

    Raises RunError: damaged rows; _NewColumnError: a row has a key that the known ones do not have.
    """
    items: dict[str, None] = {}
    values: dict[str, None] = {}
    own = list(OWN)
    with _named_damage(rows):
        for row in known:
            for keys, given in ((items, row["item"]), (values, row["value"] or {})):
                if not given.keys() <= keys.keys():
                    keys.update(dict.fromkeys(given))
            if INHERITED in row:
                own = [*OWN, INHERITED]

    def cells() -> Iterator[list[Any]]:
        with _named_damage(rows):
            for row in rows:
                item, value = row["item"], row["value"] or {}
                if not (item.keys() <= items.keys() and value.keys() <= values.keys()):
                    raise _NewColumnError
                found = [
                    *map(item.get, items),
                    *map(row.__getitem__, OWN),
                    *map(row.get, own[len(OWN) :]),
                    *map(value.get, values),
                ]
                # One look at all types takes less time than one at each cell.
                yield found if _PLAIN.issuperset(map(type, found)) else [*map(cell, found)]

    after = [*own, *(f"value.{key}" for key in values)]
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


def json_array(rows: Iterable[Row]) -> Iterator[bytes]:
    """One array, with one row on each line."""
    before = b"[\n"
    for lines in json_lines(rows):
        yield before + lines.rstrip().replace(b"\n", b",\n")
        before = b",\n"
    yield b"[]\n" if before == b"[\n" else b"\n]\n"


def _csv(rows: list[Row] | Table, known: Iterable[Row] | None = None) -> Iterator[bytes]:
    # The first rows have every key nearly always; if not, all rows are read twice.
    names, cells = _cells(rows, islice(rows, AT_ONCE) if known is None else known)
    yield csv_lines([names])
    yield from map(csv_lines, batches(cells))


def csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    """Encode rows of cells as lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


def _array(values: list[Any]) -> Any:
    """An array that keeps all of these cells: of a type of numbers if one does, else of text."""
    import numpy as np

    kinds = set(map(type, values))
    for integer in (np.int64, np.uint64):
        limits = np.iinfo(integer)
        if kinds == {int} and limits.min <= min(values) and max(values) <= limits.max:
            return np.array(values, dtype=integer)
    if kinds == {bool}:
        return np.array(values)
    exact = all(type(value) is not int or abs(value) <= 2**53 for value in values)
    if exact and kinds <= {bool, int, float, type(None)}:
        return np.array(values, dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in values])


def _npz(rows: list[Row] | Table) -> Iterator[bytes]:
    import numpy as np

    arrays = {name: _array(values) for name, values in columns_of(rows).items()}
    buffer = io.BytesIO()
    # np.savez takes names as keyword arguments, so a column could not be called "file".
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    yield buffer.getvalue()


def _parquet(rows: list[Row] | Table) -> Iterator[bytes]:
    yield parquet_of(columns_of(rows))


def parquet_of(columns: dict[str, list[Any]]) -> bytes:
    """Parquet with these columns; one whose values have no common type becomes text.

    Raises ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "writing Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="parquet")) from error

    def array(values: list[Any]) -> Any:
        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError):
            texts = [value if isinstance(value, str | None) else str(value) for value in values]
            return pa.array([text if text is None else _utf8(text) for text in texts])

    buffer = io.BytesIO()
    pq.write_table(pa.table({_utf8(name): array(some) for name, some in columns.items()}), buffer)
    return buffer.getvalue()


def _utf8(text: str) -> str:
    """Text that UTF-8 can encode: JSON may contain one half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


_WRITERS: dict[str, Callable[[list[Row] | Table], Iterator[bytes]]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".csv": _csv,
    ".npz": _npz,
    ".parquet": _parquet,
}


def read_rows(path: Path) -> list[Row]:
    """Read the rows that ``hpctk gather`` wrote as JSON; else ConfigError or RunError."""
    hint = "'hpctk gather RUN -o FILE.jsonl' writes them"
    if path.suffix not in (".jsonl", ".json"):
        message = f"{path}: results are a run, a snapshot in .json, or rows in .jsonl or .json"
        raise ConfigError(message, hint=hint)
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".json":
            rows: list[Row] = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
        message = f"{path} holds no gathered rows: {what}"
        raise RunError(message, hint=hint) from error
    for number, row in enumerate(rows, 1):
        if fault := row_fault(row):
            message = f"{path} holds no gathered rows: row {number}: {fault}"
            raise RunError(message, hint=hint)
    return rows
