"""Files of items: JSON lines, JSON, CSV, TSV, lines of text, YAML and Parquet, plain or gzipped."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from hpc_toolkit.errors import ConfigError, ItemsError
from hpc_toolkit.queue.lists import fault, not_utf8, parse_items, parse_json, read_float, typed
from hpc_toolkit.system.installation import how_to_add
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.queue.items import Item

COMMANDS = "commands"
"""The format of a file of shell commands."""


def each_item(path: Path, name: str | None = None) -> Iterator[Item]:
    """Read a file of items in the format ``name``; None: that of its suffix, or JSON lines.

    Raises ConfigError: the format is unknown. ItemsError: the file is malformed; the message names
    the line. OSError: unreadable.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    name = name or (suffixes[-1][1:] if suffixes else "jsonl")
    with path.open("rb") as file:
        yield from parse_file(file, name, str(path))


def parse_file(file: BinaryIO, name: str, source: str) -> Iterator[Item]:
    """The items of an open file, which may be gzipped. Raises as :func:`each_item` does."""
    if name not in _READERS:
        message = f"{source}: unknown format {name!r}"
        raise ConfigError(message, hint=f"--format names the format of a list: {FORMATS}")
    if hasattr(file, "peek") and file.peek(2)[:2] == b"\x1f\x8b":
        file = cast("BinaryIO", gzip.GzipFile(fileobj=file))
    try:
        yield from _READERS[name](file, source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        message = f"{source}: damaged gzip data: {error}"
        raise ItemsError(message, hint="compress the list again") from error


def _lines(file: BinaryIO, source: str) -> list[str]:
    lines = (line.removesuffix("\r") for line in _text(file.read(), source).split("\n"))
    return [line for line in lines if line.strip()]


def _commands(file: BinaryIO, source: str) -> Iterator[Item]:
    """Shell commands, one a line; a command that is given again has its number as ``repeat``."""
    times: dict[str, int] = {}
    for line in _lines(file, source):
        if not line.lstrip().startswith("#"):
            times[line] = times.get(line, 0) + 1
            yield {"line": line} | ({"repeat": times[line]} if times[line] > 1 else {})


def _json(file: BinaryIO, source: str) -> list[Item]:
    content = file.read()
    try:
        found = parse_json(content) if content.strip() else []
    except UnicodeDecodeError as error:
        raise not_utf8(content, source, source) from error
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        message = f"{source}{line}: {fault(error)}"
        raise ItemsError(message, hint="a .json file is one array of objects") from error
    return _objects(found, source, "write [{...}, {...}]; a .jsonl file has one object per line")


def _objects(found: Any, source: str, hint: str) -> list[Item]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ItemsError(f"{source}: not an array of objects", hint=hint)
    return found


def _text(content: bytes, source: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise not_utf8(content, source, f"{source}, line {line}") from error


def _csv(file: BinaryIO, source: str, delimiter: str = "") -> Iterator[Item]:
    text = _text(file.read(), source)
    if not text.strip():
        return iter(())
    if not delimiter:
        first = text.partition("\n")[0].partition("\r")[0]
        others = [mark for mark in ";\t" if mark in first and "," not in first]
        delimiter = others[0] if others else ","
        if others:
            name = "tabs" if delimiter == "\t" else "semicolons"
            note(f"{source}: its columns are separated by {name}")
    rows = _rows(text, delimiter, source)
    _, header, _ = next(rows, (1, [], set()))
    if not header or "" in header or len(set(header)) < len(header):
        message = f"{source}, line 1: column names must be unique and not empty"
        raise ItemsError(message, hint="name each column once in the first line")
    cells: list[list[str]] = []
    as_text: set[int] = set()
    for line, row, quoted in rows:
        if len(row) != len(header):
            message = f"{source}, line {line}: {len(row)} cells for {len(header)} columns"
            raise ItemsError(message, hint=f'quote cells that contain separators: "a{delimiter} b"')
        cells.append(row)
        as_text |= quoted
    columns = [list(column) for column in zip(*cells, strict=True)]
    values = [one if at in as_text else typed(one) for at, one in enumerate(columns)]
    return (dict(zip(header, row, strict=True)) for row in zip(*values, strict=True))


def _rows(text: str, delimiter: str, source: str) -> Iterator[tuple[int, list[str], set[int]]]:
    """The line, the cells and the numbers of the quoted cells of each row that is not blank.

    The module csv does not tell which cells were quoted.
    """
    cell = re.compile(
        rf'("[^"]*+(?:""[^"]*+)*+"|[^{delimiter}\r\n"][^{delimiter}\r\n]*+|)'
        rf"({delimiter}|\r\n|\r|\n|\Z)"
    )
    row: list[str] = []
    quoted: set[int] = set()
    line, begin, at = 1, 0, 0
    for found in cell.finditer(text):
        if found.start() != at:
            break
        at, value = found.end(), found[1]
        if value.startswith('"'):
            quoted.add(len(row))
            value = value[1:-1].replace('""', '"')
        row.append(value)
        if found[2] != delimiter:
            if row != [""] or quoted:
                yield line, row, quoted
            line += max(text.count("\n", begin, at), text.count("\r", begin, at))
            row, quoted, begin = [], set(), at
    if at < len(text):
        message = f"{source}, line {line}: a quote is not closed, or text follows a closing quote"
        raise ItemsError(message, hint='write a quote inside a quoted cell twice: "a ""b"" c"')


def _parquet(file: BinaryIO, source: str) -> Iterator[Item]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        message = "reading Parquet needs pyarrow, which is not installed"
        raise ConfigError(message, hint=how_to_add(extra="parquet")) from error
    try:
        table = pq.read_table(file if file.seekable() else io.BytesIO(file.read()))
        # pandas writes an index without a name in this way.
        own = {} if "index" in table.column_names else {"__index_level_0__": "index"}
        names = [own.get(name, name) for name in table.column_names]
        rows = table.rename_columns(names).to_pylist()
        for row in rows:
            yield {key: _plain(value) for key, value in row.items() if not _is_missing(value)}
    except (pa.ArrowException, OSError, ValueError) as error:
        message = f"{source}: not a list in Parquet: {error}"
        raise ItemsError(message, hint="write it with pandas' to_parquet, or use CSV") from error


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _plain(value: Any) -> Any:
    """A value of Parquet as JSON has it: a date in ISO format, another kind as its text."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    kept = value is None or isinstance(value, str | int | float)
    return value if kept else value.isoformat() if hasattr(value, "isoformat") else str(value)


def _yaml_loader(source: str) -> Any:
    import yaml

    def refuse(node: Any, wrong: str) -> NoReturn:
        where = f"{source}, line {node.start_mark.line + 1}"
        raise ItemsError(f"{where}: {node.value} {wrong}", hint="change or remove it")

    class Loader(yaml.SafeLoader):
        """Reads values as JSON does: 010, 1:30, yes and dates stay text."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            found, seen = super().compose_mapping_node(anchor), set()
            for key, _ in found.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    refuse(key, "is a key of the same mapping twice")
                seen.add((key.tag, str(key.value)))
            return found

    def number(_: Any, node: Any) -> Any:
        if node.value.lower().lstrip("+-") in (".inf", ".nan"):
            refuse(node, "is not JSON, but null is")
        with suppress(ValueError):  # 1:30.5 is in base 60
            return read_float(node.value)
        return node.value

    for kind in ("int", "bool", "timestamp"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", lambda _, node: typed([node.value])[0])
    Loader.add_constructor("tag:yaml.org,2002:float", number)
    return Loader


def _yaml(file: BinaryIO, source: str) -> list[Item]:
    try:
        import yaml
    except ImportError as error:
        message = "reading YAML needs PyYAML, which is not installed"
        raise ConfigError(message, hint=how_to_add("pyyaml")) from error

    try:
        found = yaml.load(_text(file.read(), source), _yaml_loader(source))  # noqa: S506 - safe
    except (yaml.YAMLError, RecursionError) as error:
        message = f"{source}: not YAML: {error}"
        raise ItemsError(message, hint="write a list of mappings: - seed: 1") from error
    return _objects([] if found is None else found, source, "write a list of mappings: - seed: 1")


_READERS: dict[str, Callable[[BinaryIO, str], Iterable[Item]]] = {
    "csv": _csv,
    "tsv": lambda file, source: _csv(file, source, "\t"),
    "txt": lambda file, source: ({"line": one} for one in typed(_lines(file, source))),
    **dict.fromkeys(("jsonl", "ndjson"), lambda file, source: parse_items(file, source=source)),
    "json": _json,
    "parquet": _parquet,
    "yaml": _yaml,
    "yml": _yaml,
    COMMANDS: _commands,
}
FORMATS = ", ".join(list(_READERS)[:-1])
"""The formats of lists, by the suffixes of their files."""
