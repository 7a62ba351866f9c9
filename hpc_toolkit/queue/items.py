"""Items as the user gives them, and the segment files that store them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ItemsError, RunError, near_miss
from hpc_toolkit.queue.units import MAX_UNIT, Unit, plan_units

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

Item = dict[str, Any]

_HINT = 'write one object a line, such as {"seed": 1}'


def parse_items(lines: Iterable[bytes], *, source: str) -> list[Item]:
    """Parse JSON lines; blank lines are skipped. An ItemsError names the line."""
    items = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            # Without its newline, or an error at the end would be reported on the next line.
            item = parse_json(line.rstrip(b"\r\n"))
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


# Made once: with options, ``json.loads`` and ``json.dumps`` make a new coder for each item.
_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def parse_json(line: bytes) -> Any:
    """Like ``json.loads``, but reject constants that JSON does not have, such as NaN."""
    return _decode(line.decode(json.detect_encoding(line), "surrogatepass"))


def canonical(item: Item) -> bytes:
    """Bytes that are equal iff two items are equal."""
    return _encode_sorted(item).encode()


def check_items(items: list[Item], *, group_by: str | None, taken: set[bytes]) -> None:
    """Reject a list that is empty, or has a duplicate, an item without the group's key or not JSON.

    ``taken`` are the canonical bytes of the stage's items; the new items are added to it. The
    message of the ItemsError counts items from 0.
    """
    if not items:
        message = "the list of items is empty"
        raise ItemsError(message, hint="give at least one JSON object, one per line")
    for number, item in enumerate(items):
        if group_by is not None and group_by not in item:
            message = f"item {number} has no key {group_by!r}, which --group-by needs"
            raise ItemsError(message, hint=near_miss(group_by, list(item)))
        try:
            key = canonical(item)
        except (TypeError, ValueError) as error:
            message = f"item {number} is not plain JSON: {error}"
            hint = "use only strings, finite numbers, booleans, lists and objects"
            raise ItemsError(message, hint=hint) from error
        if key in taken:
            message = f"item {number} is a duplicate: {key.decode()[:200]}"
            raise ItemsError(message, hint="remove it, or add a key that differs")
        taken.add(key)


def encode_segment(
    items: list[Item],
    *,
    group_by: str | None,
    decision: dict[str, Any] | None = None,
    unit_size: int = MAX_UNIT,
    items_per_claim: int | None = None,
    kinds: Sequence[str] | None = None,
) -> list[bytes]:
    """The lines of a segment: a header, then the items, with items of one group next to each other.

    ``unit_size``: maximum items per unit, 1 to :data:`MAX_UNIT`. ``items_per_claim``: the items of
    every unit except the last of a list or group; None: units get smaller towards the end.
    ``kinds``: the kind of each item, if kinds that appear first should be begun first; items of one
    kind are then next to each other in their group. The header's ``units`` are [first item, count,
    byte offset after the header, group]; ``order``, present if items were moved, is the given
    position of each item.
    """
    unit_size = items_per_claim or unit_size
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds or ()))}
    of_kind = [numbers[kind] for kind in kinds or ()]
    groups, labels, order = _arrange(items, group_by, of_kind or [0] * len(items))
    lines = [_dump(items[index]) for index in order]
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    header: dict[str, Any] = {
        "format": 1,
        "count": len(items),
        "unit_size": unit_size,
        "group_by": group_by,
        "groups": labels,
        "units": [
            [first, count, offsets[first], groups[first] if groups is not None else -1]
            for first, count in plan_units(
                groups, len(items), unit_size=unit_size, taper=items_per_claim is None
            )
        ],
    }
    if order != list(range(len(items))):
        header["order"] = order
    if kinds is not None:
        header["kinds"] = [of_kind[index] for index in order]
    if decision is not None:
        header["decision"] = decision
    return [_dump(header), *lines]


def _dump(record: Item) -> bytes:
    return _encode(record).encode() + b"\n"


def _arrange(
    items: list[Item], group_by: str | None, of_kind: list[int]
) -> tuple[list[int] | None, list[Any], list[int]]:
    if group_by is None:
        return None, [], sorted(range(len(items)), key=of_kind.__getitem__)
    keys = [json.dumps(item[group_by], sort_keys=True) for item in items]
    labels: dict[str, Any] = {}
    for key, item in zip(keys, items, strict=True):
        labels.setdefault(key, item[group_by])
    numbers = {key: number for number, key in enumerate(labels)}
    order = sorted(range(len(items)), key=lambda index: (numbers[keys[index]], of_kind[index]))
    return [numbers[keys[index]] for index in order], list(labels.values()), order


class Segment:
    """One published list of items; the file never changes."""

    def __init__(self, path: Path, entry: int) -> None:
        """Read the header.

        Raises FileNotFoundError, ValueError: the file is not there, or its end is missing;
        AttributeError, LookupError, TypeError: the header is complete but not valid.
        """
        self.path = path
        self.entry = entry
        """Number of its entry in the stage's log."""
        with path.open("rb") as file:
            first = file.readline()
            header = _parse_header(first)
            self._body = len(first)
            self._size = file.seek(0, os.SEEK_END)
            # A reader on another host may see the file too short, and would cut the last unit.
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
        """Value of each group, by group number."""
        self.order: list[int] | None = header.get("order")
        """Given position of each item; None if the items keep their given order."""
        self.decision: dict[str, Any] | None = header.get("decision")
        """The coordinator's decision when it added this segment; None in other segments."""
        self._kinds: list[int] = header.get("kinds") or []
        self._table: list[list[int]] = header["units"]
        self.units = [Unit(entry, row[0], row[1], row[3]) for row in self._table]
        """In the order of their items."""
        self._index = {row[0]: index for index, row in enumerate(self._table)}

    def lines(self, unit: Unit, *, fd: int | None = None) -> list[bytes]:
        """The JSON of a unit's items, without newlines; ``fd``: an open descriptor of this file.

        Raises RunError: lines are damaged; the message names the first one.
        """
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
        lines = data.split(b"\n")[:-1]
        self._check(unit, lines)
        return lines

    def _check(self, unit: Unit, lines: list[bytes]) -> None:
        """Reject lines that are not a unit's items.

        Otherwise work on them may end in the middle, and the worker would blame items next to the
        damaged line for killing it.
        """
        if len(lines) != unit.count:
            raise self._damaged(unit.first, f"{len(lines)} lines where there were {unit.count}")
        with suppress(ValueError, RecursionError):
            # All in one call: one by one takes three times as long.
            items = json.loads((b"[%s]" % b",".join(lines)).decode())
            if len(items) == unit.count and all(map(self._is_item, items)):
                return
        for position, line in enumerate(lines, unit.first):
            try:
                item = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise self._damaged(position, f"not JSON: {error}") from error
            if not self._is_item(item):
                key = "" if self.group_by is None else f" with the key {self.group_by!r}"
                raise self._damaged(position, f"not a JSON object{key}")

    def _is_item(self, value: object) -> bool:
        return isinstance(value, dict) and (self.group_by is None or self.group_by in value)

    def _damaged(self, position: int, what: str) -> RunError:
        # Line 1 is the header, and positions count from 0.
        message = f"{self.path}, line {position + 2}, is damaged: {what}"
        run = self.path.parents[3]
        hint = f"restore the file from a backup; 'hpctk doctor {run}' shows what else is damaged"
        return RunError(message, hint=hint)

    def unit_of(self, item: int) -> Unit:
        from bisect import bisect_right

        return self.units[bisect_right(self._table, item, key=lambda row: row[0]) - 1]

    def items(self) -> Iterator[bytes]:
        """The JSON of every item, by position. Raises RunError: as :meth:`lines` does."""
        with self.path.open("rb") as file:
            for unit in self.units:
                yield from self.lines(unit, fd=file.fileno())

    def group_of(self, unit: Unit) -> Any:
        return self.groups[unit.group] if unit.group >= 0 else None

    def kind_of(self, unit: Unit) -> int:
        return self._kinds[unit.first] if self._kinds else 0


class UnitReader:
    """Reads one unit after another; keeps the file of the last unit's segment open."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._fd = -1

    def lines(self, segment: Segment, unit: Unit) -> list[bytes]:
        if segment is self._segment:
            # After a server outage the descriptor may be stale while the path still works.
            with suppress(OSError):
                return segment.lines(unit, fd=self._fd)
        self.close()
        self._fd = os.open(segment.path, os.O_RDONLY)
        self._segment = segment
        return segment.lines(unit, fd=self._fd)

    def close(self) -> None:
        if self._segment is not None:
            self._segment = None
            with suppress(OSError):
                os.close(self._fd)


def _check_kinds(kinds: object, count: int) -> None:
    if not isinstance(kinds, list) or any(type(kind) is not int for kind in kinds):
        message = "its kinds are not a list of numbers"
        raise TypeError(message)
    if len(kinds) != count:
        message = f"it has {len(kinds)} kinds of {count!r} items"
        raise LookupError(message)


def _parse_header(line: bytes) -> dict[str, Any]:
    """Parse and check the header of a segment.

    Raises ValueError for a line that is not JSON, for example because a part is not visible yet;
    LookupError or TypeError for JSON that is not the header of a segment.
    """
    try:
        header: dict[str, Any] = json.loads(line)
    except RecursionError as error:
        raise TypeError(str(error)) from error
    count, order = header["count"], header.get("order")
    items = _check_units(header["units"], len(header["groups"]))
    if items != count or (order is not None and len(order) != count):
        message = f"its units or their order are not those of {count!r} items"
        raise LookupError(message)
    if header.get("kinds") is not None:  # only segments of a search have kinds
        _check_kinds(header["kinds"], count)
    optional = ("decision", header.get("decision"), dict), ("group_by", header["group_by"], str)
    for name, value, kind in optional:
        if value is not None and not isinstance(value, kind):
            message = f"its {name} is {type(value).__name__}"
            raise TypeError(message)
    return header


def _check_units(rows: list[list[int]], groups: int) -> int:
    """Check that units follow each other without a gap; return the number of their items."""
    first, behind = 0, -1
    for row in rows:
        if len(row) != 4 or any(type(number) is not int for number in row):
            message = f"unit {row!r} is not four numbers"
            raise TypeError(message)
        # A gap or an overlap would give an item the result of another item.
        if row[0] != first or row[1] < 1 or row[2] <= behind or (first == 0 and row[2] != 0):
            message = f"unit {row!r} does not begin where the one before ends"
            raise LookupError(message)
        if not -1 <= row[3] < max(1, groups):
            message = f"unit {row!r} is of a group that is not there"
            raise LookupError(message)
        first, behind = first + row[1], row[2]
    return first
