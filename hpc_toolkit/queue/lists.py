"""Lists of items as users give them: counts, grids, JSON lines, and files of other kinds."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.jsonlines import batches, decode, decode_each
from hpc_toolkit.system.quantities import parse_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from hpc_toolkit.queue.items import Item

MOST_ITEMS = 10_000_000
"""More items than this in a count or a grid are taken for a mistake."""


_HINT = 'write one object a line, such as {"seed": 1}'


def parse_items(lines: Iterable[bytes], *, source: str) -> Iterator[Item]:
    """Parse JSON lines; blank lines are skipped. An ItemsError names the line."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for some in batches(numbered):
        try:
            items = decode_each([line for _, line in some])
        except (ValueError, RecursionError):
            items = []
        if len(items) == len(some) and all(isinstance(item, dict) for item in items):
            yield from items
        else:
            yield from (_parse_item(line, f"{source}, line {number}") for number, line in some)


def _parse_item(line: bytes, where: str) -> Item:
    try:
        # Without its newline, or an error at the end would be reported on the next line.
        item = parse_json(line.rstrip(b"\r\n"))
    except (ValueError, RecursionError) as error:
        at, what = "", str(error)
        if isinstance(error, json.JSONDecodeError):
            at, what = f", column {error.colno}", error.msg
        message = f"{where}{at}: not JSON: {what}"
        raise ItemsError(message, hint=_HINT) from error
    if not isinstance(item, dict):
        message = f"{where}: not a JSON object but {type(item).__name__}"
        raise ItemsError(message, hint=_HINT)
    return item


def parse_json(line: bytes) -> Any:
    """Like ``json.loads``, but reject constants that JSON does not have, such as NaN."""
    return decode(line.decode(json.detect_encoding(line), "surrogatepass"))


def counted(count: int, key: str) -> Iterator[Item]:
    """Items whose only ``key`` is 0 to ``count`` - 1. Raises ConfigError."""
    if not 1 <= count <= MOST_ITEMS:
        message = f"--count: {count} items"
        raise ConfigError(message, hint=f"write a number from 1 to {MOST_ITEMS}")
    return ({key: number} for number in range(count))


def grid(axes: Iterable[str]) -> Iterator[Item]:
    """Items for every combination of the values of ``NAME=VALUES``; the last name varies fastest.

    VALUES are numbers, words and ranges FIRST:LAST[:STRIDE], separated by commas; a range includes
    its last number. A value in JSON's notation of a number, true, false or null is that; any other
    is text. Raises ConfigError: an axis has no name, no values or the name of another.
    """
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, equals, text = axis.partition("=")
        if not name or not equals:
            message = f"--grid: {axis!r} is not NAME=VALUES"
            raise ConfigError(message, hint="such as --grid lr=0.1,0.01 --grid seed=0:9")
        if name in values:
            message = f"--grid: {name} is given twice"
            raise ConfigError(message, hint="list all values of a name in one --grid")
        values[name] = parse_values(text, f"--grid {name}")
    return combinations(values, "--grid")


def combinations(values: Mapping[str, Sequence[Any]], where: str) -> Iterator[Item]:
    """Items for every combination; the last name varies fastest. Raises ConfigError: too many."""
    total = math.prod(map(len, values.values()))
    if total > MOST_ITEMS:
        message = f"{where}: {total} combinations"
        raise ConfigError(message, hint=f"use fewer values: at most {MOST_ITEMS} items")
    return (dict(zip(values, one, strict=True)) for one in itertools.product(*values.values()))


def parse_values(text: str, where: str) -> list[Any]:
    """Parse numbers, words and ranges, separated by commas. Raises ConfigError."""
    return list(itertools.chain(*(_values(part, where) for part in text.split(","))))


def _values(text: str, where: str) -> Sequence[Any]:
    text = text.strip()
    if not text:
        message = f"{where}: a value is empty"
        raise ConfigError(message, hint="separate values by single commas")
    words = text.split(":")
    if len(words) > 1 and all(word.strip().lstrip("-").isdecimal() for word in words):
        numbers = parse_range(text, where=where)
        if len(numbers) > MOST_ITEMS:
            message = f"{where}: {text} has {len(numbers)} values"
            raise ConfigError(message, hint=f"use at most {MOST_ITEMS} values")
        return numbers
    return [_scalar(text)]


def _scalar(text: str) -> Any:
    """A number, true, false or null in JSON's notation; any other text stays text."""
    try:
        found = parse_json(text.encode())
    except (ValueError, RecursionError):
        return text
    if isinstance(found, str | list | dict) or (isinstance(found, float) and math.isinf(found)):
        return text
    return found


def read_list(path: Path) -> list[Item]:
    """As :func:`each_item`, all items at once."""
    return list(each_item(path))


def each_item(path: Path) -> Iterator[Item]:
    """Read a file of items: .csv, .json (an array), .parquet, or JSON lines in any other file.

    Raises ItemsError: the file is malformed; the message names the line. OSError: unreadable.
    """
    read = _READERS.get(path.suffix)
    with path.open("rb") as file:
        yield from parse_items(file, source=str(path)) if read is None else read(file, str(path))


def _json(file: BinaryIO, source: str) -> list[Item]:
    try:
        found = parse_json(file.read())
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        message = f"{source}{line}: not JSON: {getattr(error, 'msg', error)}"
        raise ItemsError(message, hint="a .json file is one array of objects") from error
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        message = f"{source}: not an array of objects"
        raise ItemsError(
            message, hint="write [{...}, {...}]; a .jsonl file has one object per line"
        )
    return found


def _csv(file: BinaryIO, source: str) -> list[Item]:
    content = file.read()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"{source}, line {line}: not UTF-8: {error.reason}"
        raise ItemsError(message, hint="save the file as UTF-8") from error
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    items: list[Item] = []
    try:
        header = next(rows, [])
        if not header or "" in header or len(set(header)) < len(header):
            message = f"{source}, line 1: column names must be unique and not empty"
            raise ItemsError(message, hint="name each column once in the first line")
        for row in rows:
            if row and len(row) != len(header):
                message = (
                    f"{source}, line {rows.line_num}: {len(row)} cells for {len(header)} columns"
                )
                raise ItemsError(message, hint='quote cells that contain commas: "a, b"')
            if row:
                items.append(dict(zip(header, map(_scalar, row), strict=True)))
    except csv.Error as error:
        message = f"{source}, line {rows.line_num}: {error}"
        raise ItemsError(message, hint="use CSV with commas, and quotes in pairs") from error
    return items


def _parquet(file: BinaryIO, source: str) -> list[Item]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "reading Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="parquet")) from error
    try:
        return list(pq.read_table(file).to_pylist())
    except (pa.ArrowException, OSError) as error:
        message = f"{source}: not Parquet: {error}"
        raise ItemsError(message, hint="write it with pandas' to_parquet, or use CSV") from error


_READERS: dict[str, Callable[[BinaryIO, str], list[Item]]] = {
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
