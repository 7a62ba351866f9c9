"""Items as the user gives them, and the segment files that store them."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpc_toolkit.errors import ItemsError, RunError, near_miss
from hpc_toolkit.queue.units import MAX_UNIT, Unit, parse_header, plan_units, runs_of
from hpc_toolkit.rundir.journal import read_span
from hpc_toolkit.system.jsonlines import (
    batches,
    decode,
    decode_each,
    encode,
    encode_each,
    is_kept,
    not_json,
    without_collections,
)

Item = dict[str, Any]

_encode_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical(item: Item) -> bytes:
    """Bytes that are equal iff two items are equal."""
    return _encode_sorted(item).encode()


class ItemLines:
    """Items of one list as lines of JSON, which take a tenth of the memory of objects."""

    def __init__(self, items: Iterable[Item] = (), *, group_by: str | None = None) -> None:
        self.group_by = group_by
        self.lines: list[bytes] = []
        """In the order in which they were given, without newlines."""
        from array import array  # workers do without it

        self.groups = array("l")
        """Number of each item's group, if there are groups."""
        self.labels: list[Any] = []
        """Value of each group."""
        self.wants: list[str] = []
        """The want of each item (:mod:`hpc_toolkit.queue.wants`); [] if none has one of its own."""
        self._numbers: dict[str, int] = {}
        for some in batches(items):
            self.add(some, encode_each(some))

    def __len__(self) -> int:
        return len(self.lines)

    def add(self, items: list[Item], lines: list[bytes]) -> None:
        self.lines += lines
        if self.group_by is not None:
            self.groups.extend(self._group_of(item[self.group_by]) for item in items)

    def _group_of(self, label: Any) -> int:
        # Encoding takes most of the time; of other values, no JSON begins with a quote.
        key = f'"{label}' if type(label) is str else json.dumps(label, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.labels)
            self.labels.append(label)
        return self._numbers[key]


class _Distinct:
    """Tells whether items differ, by a form of each that is equal iff two items are equal.

    If an item has no objects in it and the keys of the first one, this form is its line, with the
    keys in the order of the first one. That saves encoding nearly all items twice.
    """

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._keys: tuple[str, ...] = ()

    def add(self, items: list[Item], lines: list[bytes]) -> bool:
        """Whether these can be items, and differ from each other and all before; else add none."""
        if not self._keys and all(isinstance(key, str) for key in items[0]):
            self._keys = tuple(items[0])
        flat = b"".join(lines).count(b"{") == len(lines)
        alike = flat and self._keys and {self._keys}.issuperset(map(tuple, items))
        kept = alike or all(map(is_kept, items))
        forms = lines if alike else list(map(self._form, items, lines))
        if not kept or len(set(forms)) < len(forms) or not self._seen.isdisjoint(forms):
            return False
        self._seen.update(forms)
        return True

    def _form(self, item: Item, line: bytes) -> bytes:
        if line.count(b"{") > 1 or item.keys() != set(self._keys):
            return canonical(item)
        return encode({key: item[key] for key in self._keys}).encode()


def has_key(item: Container[str], key: str) -> bool:
    """Whether an item has what a command writes as ``{key}``, or as ``{key.part}``."""
    return key in item or key.partition(".")[0] in item


def _lacked(item: Item, group_by: str | None, needs: Sequence[str]) -> str | None:
    """The first key that an item should have and lacks."""
    if group_by is not None and group_by not in item:
        return group_by
    return next((key for key in needs if not has_key(item, key)), None)


@without_collections()
def check_items(
    items: Iterable[Item],
    *,
    group_by: str | None,
    taken: Iterable[Item] = (),
    needs: Sequence[str] = (),
    may_be_empty: bool = False,
) -> ItemLines:
    """Encode a list, which is read once and never held as objects.

    ``taken`` are the items that the stage has, and ``needs`` the keys that its command needs.
    Raises ItemsError: the list is empty, or an item is a duplicate, lacks a key or is not JSON.
    """
    found, distinct = ItemLines(group_by=group_by), _Distinct()
    for some in batches(taken):
        distinct.add(some, encode_each(some))
    for some in batches(items):
        lines: list[bytes] = []
        with suppress(AttributeError, TypeError, ValueError):
            if not any(_lacked(item, group_by, needs) for item in some):
                encoded = encode_each(some)
                lines = encoded if distinct.add(some, encoded) else []
        if not lines:
            _refuse(some, len(found), group_by, needs, distinct)
        found.add(some, lines)
    if not (found or may_be_empty):
        message = "the list of items is empty"
        raise ItemsError(message, hint="give at least one JSON object, one per line")
    return found


def _refuse(
    items: list[Any], first: int, group_by: str | None, needs: Sequence[str], distinct: _Distinct
) -> NoReturn:
    """Raise the ItemsError of the first of these items that is not valid; its number, from 0."""
    for number, item in enumerate(items, first):
        try:
            kept = isinstance(item, dict) and is_kept(item)
            is_new = kept and distinct.add([item], encode_each([item]))
        except (TypeError, ValueError) as error:
            message = f"item {number} is not plain JSON: {not_json(item) or error}"
            hint = "use text, finite numbers, lists and dicts"
            raise ItemsError(message, hint=hint, number=number) from error
        if not kept:
            message = f"item {number} is not a dict with text as its keys: {item!r:.200}"
            raise ItemsError(message, hint="such as {'seed': 1}; make keys text", number=number)
        if key := _lacked(item, group_by, needs):
            what = "--group-by" if key == group_by else "the command"
            message = f"item {number} has no key {key!r}, which {what} needs"
            raise ItemsError(message, hint=near_miss(key, list(item)), number=number)
        if not is_new:
            message = f"item {number} is a duplicate: {canonical(item).decode()[:200]}"
            raise ItemsError(message, hint="remove it, or add a key that differs", number=number)
    raise AssertionError(items)


def encode_segment(
    items: Iterable[Item] | ItemLines,
    *,
    group_by: str | None,
    decision: dict[str, Any] | None = None,
    unit_size: int = MAX_UNIT,
    items_per_claim: int | None = None,
    kinds: Sequence[str] | None = None,
    origins: list[Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[bytes]:
    """A segment: a header line, then the items' lines, with items of one group next to each other.

    ``unit_size``: maximum items per unit, 1 to :data:`MAX_UNIT`. ``items_per_claim``: the items of
    every unit except the last of a list or group; None: units get smaller towards the end.
    ``kinds``: the kind of each item, if kinds that appear first should be begun first; items of one
    kind are then next to each other in their group. ``origins``: of what the items were made, in a
    stage that follows another. ``numbers``: those of the items in a list whose items follow each
    other. Items of one unit have the same want. The header's ``units`` are [first item, count,
    byte offset after the header, group]; ``order``, present if items were moved, is the given
    position of each item.
    """
    given = items if isinstance(items, ItemLines) else ItemLines(items, group_by=group_by)
    lines, unit_size = given.lines, items_per_claim or unit_size
    known = {kind: number for number, kind in enumerate(dict.fromkeys(kinds or ()))}
    of_kind = [known[kind] for kind in kinds or ()]
    order = _arrange(given, of_kind)
    groups = None if group_by is None else [given.groups[index] for index in order]
    units, offset = [], 0
    wants = [given.wants[index] for index in order] if given.wants else []
    cut: list[tuple[int, int]] = []
    for start, length in runs_of(wants) or [(0, len(lines))]:
        of = None if groups is None else groups[start : start + length]
        found = plan_units(of, length, unit_size=unit_size, taper=items_per_claim is None)
        cut += [(start + first, count) for first, count in found]
    for first, count in cut:
        units.append([first, count, offset, groups[first] if groups is not None else -1])
        offset += count + sum(len(lines[index]) for index in order[first : first + count])
    header: dict[str, Any] = {
        "format": 1,
        "count": len(lines),
        "unit_size": unit_size,
        "group_by": group_by,
        "groups": given.labels,
        "units": units,
    }
    if any(index != position for position, index in enumerate(order)):
        header["order"] = order
    if kinds is not None:
        header["kinds"] = [of_kind[index] for index in order]
    if decision is not None:
        header["decision"] = decision
    if origins is not None:
        header["origins"] = origins
    if numbers is not None:
        header["numbers"] = [numbers[index] for index in order]
    if set(wants) - {"{}"}:
        known = {want: number for number, want in enumerate(dict.fromkeys(wants))}
        header["wants"] = [json.loads(want) for want in known]
        header["wanted"] = [known[wants[first]] for first, _ in cut]
    yield encode(header).encode() + b"\n"
    for first, count in cut:
        yield b"".join([b"%s\n" % lines[index] for index in order[first : first + count]])


def _arrange(items: ItemLines, of_kind: list[int]) -> Sequence[int]:
    """The given position of each item, in the order of the segment."""
    known = {want: number for number, want in enumerate(dict.fromkeys(items.wants))}
    wants = [known[want] for want in items.wants]
    groups = items.groups if items.group_by is not None else ()
    keys = [*zip(*(key for key in (wants, groups, of_kind) if len(key)), strict=True)]
    positions = range(len(items))
    return sorted(positions, key=keys.__getitem__) if keys else positions


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
            header = parse_header(first)
            body, size = len(first), file.seek(0, os.SEEK_END)
            # A reader on another host may see the file too short, and would cut the last unit.
            _, count, at, _ = header["units"][-1]
            file.seek(body + at)
            if file.read().count(b"\n") != count:
                raise ValueError(f"{path} ends too early")
        self.count: int = header["count"]
        """Number of items."""
        self.group_by: str | None = header["group_by"]
        self.groups: list[Any] = header["groups"]
        """Value of each group, by group number."""
        self.order: list[int] | None = header.get("order")
        """Given position of each item; None if the items keep their given order."""
        self.decision: dict[str, Any] | None = header.get("decision")
        """The coordinator's decision when it added this segment; None in other segments."""
        self.origins: list[Any] = header.get("origins") or []
        """In a stage that follows another: [entry, position] of each item before whose result made
        items of this segment, or the values of each combination of keys."""
        self.numbers: list[int] | None = header.get("numbers")
        """Number of each item in a list whose items follow each other; None in other lists."""
        self._kinds: list[int] = header.get("kinds") or []
        self._wants = [encode(one) for one in header.get("wants", ())]
        self._wanted: list[int] = header.get("wanted", [])
        rows = header["units"]
        self._starts = [*(body + row[2] for row in rows), size]
        """First byte of each unit, and the byte after the last one."""
        self.units = [Unit(entry, first, count, group) for first, count, _, group in rows]
        """In the order of their items."""

    def lines(self, unit: Unit, *, fd: int | None = None) -> list[bytes]:
        """The JSON of a unit's items, without newlines; ``fd``: an open descriptor of this file.

        Raises RunError: lines are damaged; the message names the first one.
        """
        return self.read(unit, fd=fd)[0]

    def read(self, unit: Unit, *, fd: int | None = None) -> tuple[list[bytes], list[Item]]:
        """As :meth:`lines`, and the items themselves."""
        index = self._index(unit.first)
        start, end = self._starts[index : index + 2]
        opened = os.open(self.path, os.O_RDONLY) if fd is None else fd
        try:
            data = read_span(opened, start, end)
        finally:
            if fd is None:
                os.close(opened)
        lines = data.split(b"\n")[:-1]
        return lines, self._decode(unit, lines)

    def _decode(self, unit: Unit, lines: list[bytes]) -> list[Item]:
        """Decode a unit's items, or reject the lines.

        Otherwise work on them may end in the middle, and the worker would blame items next to the
        damaged line for killing it.
        """
        if len(lines) != unit.count:
            raise self._damaged(unit.first, f"{len(lines)} lines where there were {unit.count}")
        with suppress(ValueError, RecursionError):
            items = decode_each(lines)
            if self._are_items(items):
                return items
        for position, line in enumerate(lines, unit.first):
            try:
                item = decode(line.decode())
            except (ValueError, RecursionError) as error:
                raise self._damaged(position, f"not JSON: {error}") from error
            if not self._are_items([item]):
                key = "" if self.group_by is None else f" with the key {self.group_by!r}"
                raise self._damaged(position, f"not a JSON object{key}")
        raise AssertionError(lines)

    def _are_items(self, values: list[Any]) -> bool:
        key, are_objects = self.group_by, set(map(type, values)) == {dict}
        return are_objects and (key is None or all(key in value for value in values))

    def _damaged(self, position: int, what: str) -> RunError:
        # Line 1 is the header, and positions count from 0.
        message = f"{self.path}, line {position + 2}, is damaged: {what}"
        run = self.path.parents[3]
        hint = f"restore the file from a backup; 'hpctk doctor {run}' shows what else is damaged"
        return RunError(message, hint=hint)

    def number(self, position: int) -> int:
        """Number of an item as it was given: in its list, or in this segment."""
        found = self.numbers or self.order
        return position if found is None else found[position]

    def unit_of(self, item: int) -> Unit:
        return self.units[self._index(item)]

    def _index(self, item: int) -> int:
        return bisect_right(self.units, item, key=lambda unit: unit.first) - 1

    def items(self) -> Iterator[bytes]:
        """The JSON of every item, by position. Raises RunError: as :meth:`lines` does."""
        with self.path.open("rb") as file:
            for unit in self.units:
                yield from self.lines(unit, fd=file.fileno())

    def group_of(self, unit: Unit) -> Any:
        return self.groups[unit.group] if unit.group >= 0 else None

    def kind_of(self, unit: Unit) -> int:
        return self._kinds[unit.first] if self._kinds else 0

    def units_by_want(self) -> Iterable[tuple[str, list[Unit]]]:
        found: dict[str, list[Unit]] = {}
        for unit, want in zip(self.units, self._wanted, strict=False):
            found.setdefault(self._wants[want], []).append(unit)
        return found.items() or [("{}", self.units)]

    def want_of(self, unit: Unit) -> str:
        """What the items of a unit need (:mod:`hpc_toolkit.queue.wants`)."""
        return self._wants[self._wanted[self._index(unit.first)]] if self._wanted else "{}"


class UnitReader:
    """Reads one unit after another; keeps the file of the last unit's segment open."""

    def __init__(self) -> None:
        self._segment: Segment | None = None
        self._fd = -1

    def read(self, segment: Segment, unit: Unit) -> tuple[list[bytes], list[Item]]:
        """As :meth:`Segment.read`."""
        if segment is self._segment:
            # After a server outage the descriptor may be stale while the path still works.
            with suppress(OSError):
                return segment.read(unit, fd=self._fd)
        self.close()
        self._fd = os.open(segment.path, os.O_RDONLY)
        self._segment = segment
        return segment.read(unit, fd=self._fd)

    def close(self) -> None:
        if self._segment is not None:
            self._segment = None
            with suppress(OSError):
                os.close(self._fd)
