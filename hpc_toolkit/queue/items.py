"""Items as the user gives them, and the segment file that holds them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ItemsError, near_miss
from hpc_toolkit.queue.units import MAX_UNIT, Unit, plan_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Item = dict[str, Any]

_HINT = 'write one object a line, such as {"seed": 1}'


def parse_items(lines: Iterable[bytes], *, source: str) -> list[Item]:
    """Parse JSON lines; blank lines are skipped.

    Raises:
        ItemsError: names the line that is not a JSON object.
    """
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            # Without its newline: what is missing at the end would be missed on the next line.
            item = _parse(line.rstrip(b"\r\n"))
        except (ValueError, RecursionError) as error:
            at, what = "", str(error)
            if isinstance(error, json.JSONDecodeError):
                at, what = f", column {error.colno}", error.msg
            message = f"{source}, line {number}{at}: not JSON: {what}"
            raise ItemsError(message, hint=_HINT) from error
        if not isinstance(item, dict):
            message = f"{source}, line {number}: not a JSON object but {type(item).__name__}"
            raise ItemsError(message, hint=_HINT)
        items.append(item)
    return items


def _refuse_constant(name: str) -> object:
    message = f"{name} is not JSON"
    raise ValueError(message)


# Made once: ``json.loads`` and ``json.dumps`` with options make one for each item of a long list.
_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def _parse(line: bytes) -> Any:
    """As ``json.loads`` does, but for constants that JSON does not have."""
    return _decode(line.decode(json.detect_encoding(line), "surrogatepass"))


def canonical(item: Item) -> bytes:
    """Bytes that are equal iff two items are equal."""
    return _encode_sorted(item).encode()


def check_items(items: list[Item], *, group_by: str | None, taken: set[bytes]) -> None:
    """Refuse lists that cannot be run.

    Args:
        items: the new items.
        group_by: the key that every item must have.
        taken: canonical bytes of the items that the stage has; grows by the new ones.

    Raises:
        ItemsError: empty, a duplicate, or without the group's key; items are counted from 0, as
            everywhere.
    """
    if not items:
        message = "the list of items is empty"
        raise ItemsError(message, hint="give at least one JSON object, one a line")
    for number, item in enumerate(items):
        if group_by is not None and group_by not in item:
            message = f"item {number} has no key {group_by!r}, by which items are grouped"
            raise ItemsError(message, hint=near_miss(group_by, list(item)))
        try:
            key = canonical(item)
        except (TypeError, ValueError) as error:
            message = f"item {number} is not plain JSON: {error}"
            raise ItemsError(
                message, hint="use strings, finite numbers, lists and objects"
            ) from error
        if key in taken:
            message = f"item {number} is there twice: {key.decode()[:200]}"
            raise ItemsError(message, hint="remove it, or tell the two apart by another key")
        taken.add(key)


def encode_segment(
    items: list[Item], *, group_by: str | None, decision: dict[str, Any] | None = None
) -> list[bytes]:
    """The lines of a segment: a header, then the items, those of one group next to each other.

    The header's ``units`` are [first item, count, byte offset behind the header, group]; ``order``,
    where grouping moved items, is the given position of each.
    """
    groups, labels, order = _arrange(items, group_by)
    lines = [_dump(items[index]) for index in order]
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    header: dict[str, Any] = {
        "format": 1,
        "count": len(items),
        "unit_size": MAX_UNIT,
        "group_by": group_by,
        "groups": labels,
        "units": [
            [first, count, offsets[first], groups[first] if groups is not None else -1]
            for first, count in plan_units(groups, len(items))
        ],
    }
    if order != list(range(len(items))):
        header["order"] = order
    if decision is not None:
        header["decision"] = decision
    return [_dump(header), *lines]


def _dump(record: Item) -> bytes:
    return _encode(record).encode() + b"\n"


def _arrange(
    items: list[Item], group_by: str | None
) -> tuple[list[int] | None, list[Any], list[int]]:
    if group_by is None:
        return None, [], list(range(len(items)))
    numbers: dict[str, int] = {}
    labels: list[Any] = []
    groups = []
    for item in items:
        key = json.dumps(item[group_by], sort_keys=True)
        if key not in numbers:
            numbers[key] = len(numbers)
            labels.append(item[group_by])
        groups.append(numbers[key])
    order = sorted(range(len(items)), key=groups.__getitem__)
    return [groups[index] for index in order], labels, order


class Segment:
    """One published list of items; the file never changes."""

    def __init__(self, path: Path, entry: int) -> None:
        """Read its header.

        Raises:
            FileNotFoundError, ValueError: it is not there, or a part is missing at its end.
            LookupError, TypeError: its header is whole, and not that of a segment.
        """
        self.path = path
        self.entry = entry
        """Number of its entry in the stage's log."""
        with path.open("rb") as file:
            first = file.readline()
            header = json.loads(first)
            self._body = len(first)
            self._size = file.seek(0, os.SEEK_END)
            # A reader elsewhere may see the file shorter than it is; the last unit would be cut.
            last = header["units"][-1]
            count = last[1]
            file.seek(self._body + last[2])
            if file.read().count(b"\n") != count:
                message = f"{path} ends too early"
                raise ValueError(message)
        self.count: int = header["count"]
        """Number of items."""
        self.group_by: str | None = header["group_by"]
        self.groups: list[Any] = header["groups"]
        """The groups' values."""
        self.order: list[int] | None = header.get("order")
        """Given position of each item; None if they stand as given."""
        self.decision: dict[str, Any] | None = header.get("decision")
        """What conduct decided when it added this segment."""
        self._table: list[list[int]] = header["units"]
        self.units = [Unit(entry, row[0], row[1], row[3]) for row in self._table]
        """In the order of their items."""
        self._index = {row[0]: index for index, row in enumerate(self._table)}

    def lines(self, unit: Unit, *, fd: int | None = None) -> list[bytes]:
        """The JSON of a unit's items, without newlines; ``fd``: of this file, where it is open."""
        index = self._index[unit.first]
        start = self._body + self._table[index][2]
        last = index + 1 == len(self._table)
        end = self._size if last else self._body + self._table[index + 1][2]
        opened = os.open(self.path, os.O_RDONLY) if fd is None else fd
        try:
            data = os.pread(opened, end - start, start)
        finally:
            if fd is None:
                os.close(opened)
        return data.split(b"\n")[:-1]

    def unit_of(self, item: int) -> Unit:
        """The unit that holds an item."""
        from bisect import bisect_right

        return self.units[bisect_right(self._table, item, key=lambda row: row[0]) - 1]

    def items(self) -> Iterator[bytes]:
        """The JSON of every item, by position."""
        with self.path.open("rb") as file:
            file.seek(self._body)
            for line in file:
                yield line[:-1]

    def group_of(self, unit: Unit) -> Any:
        """The value of the group of a unit's first item; None without groups."""
        return self.groups[unit.group] if unit.group >= 0 else None


class UnitReader:
    """Reads one unit after another; the file of the last one's segment stays open."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._fd = -1

    def lines(self, segment: Segment, unit: Unit) -> list[bytes]:
        """As :meth:`Segment.lines` gives them."""
        if segment is self._segment:
            # What was opened before a server went away may be dead where the name is not.
            with suppress(OSError):
                return segment.lines(unit, fd=self._fd)
        self.close()
        self._fd = os.open(segment.path, os.O_RDONLY)
        self._segment = segment
        return segment.lines(unit, fd=self._fd)

    def close(self) -> None:
        """Close the file."""
        if self._segment is not None:
            self._segment = None
            with suppress(OSError):
                os.close(self._fd)
