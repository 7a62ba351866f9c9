"""Units, the items of one claim; the segment files that have them, and the claims themselves.

Units are a pure function of the groups, fixed when a segment is made, and checked when its header
is read, so that no item gets the result of another. Claims are names that only one worker can
create (rules R1, R3).
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hpc_toolkit.errors import RunError
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import read_span
from hpc_toolkit.rundir.layout import StagePaths
from hpc_toolkit.system.jsonlines import decode, decode_each, encode

MAX_UNIT = 256
"""Maximum items per unit, which bounds the work that others repeat after a death."""
_SHARES = 64
# A unit gets at most 1/64 of the items left, so the last units are single items and workers finish
# together.
_SHORT = 4096
_SHORT_SHARES = 256
# The items of a short list may take hours. With 1/64, 500 items on 100 workers would take as long
# as 8 items one after another; with 1/256, as long as 5. A group keeps larger units: some workloads
# compute all its items at once.
_MAX_GROUP_UNITS = 8192  # or a few percent more, as sizes are rounded
# With more groups, several complete groups share a unit, or claims would need too many inodes.

_SUFFIX = ".lock"
_FIRST = f".1{_SUFFIX}"


class Unit(NamedTuple):
    """Consecutive items of one segment."""

    entry: int
    """Number of the segment in the stage's log."""
    first: int
    """Position of the first item in the segment, from 0."""
    count: int  # type: ignore[assignment]
    """Number of items."""
    group: int
    """Index of the first item's group in the segment; -1 without groups."""

    @property
    def name(self) -> str:
        return f"{self.entry:06d}-{self.first}"

    @property
    def items(self) -> range:
        return range(self.first, self.first + self.count)


def plan_units(
    spans: Sequence[tuple[int, int]] | None,
    count: int,
    *,
    unit_size: int = MAX_UNIT,
    taper: bool = True,
) -> list[tuple[int, int]]:
    """Cut ``count`` items into units: (first, count) of each, in order, without a gap.

    ``spans`` are (first, count) of each group; None without groups. Without ``taper``, units have
    ``unit_size`` items up to the end of the list or of a group.
    """
    if spans is not None and len(spans) > _MAX_GROUP_UNITS:
        return _pack(spans, unit_size)
    shares = _SHORT_SHARES if spans is None and count <= _SHORT else _SHARES
    units = []
    for first, length in spans or [(0, count)]:
        at, stop = first, first + length
        while at < stop:
            share = -(-(count - at) // shares) if taper else unit_size
            size = min(unit_size, share, stop - at)
            units.append((at, size))
            at += size
    return units


def runs_of(groups: Sequence[object]) -> list[tuple[int, int]]:
    """(first, count) of equal values that follow each other."""
    runs: list[tuple[int, int]] = []
    for position, group in enumerate(groups):
        if runs and groups[position - 1] == group:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs


def _pack(spans: Sequence[tuple[int, int]], unit_size: int) -> list[tuple[int, int]]:
    """Units of several groups: twice the mean number at first, evenly fewer, one at the end."""
    mean = len(spans) / _MAX_GROUP_UNITS
    slope = 4 * (mean - 1) / _MAX_GROUP_UNITS
    units: list[tuple[int, int]] = []
    room = 0
    for number, (first, length) in enumerate(spans):
        if room > 0 and units[-1][1] + length <= unit_size:
            units[-1] = (units[-1][0], units[-1][1] + length)
            room -= 1
            continue
        # A size that falls evenly from unit to unit falls as this square root from group to group.
        size = round(math.sqrt((2 * mean - 1) ** 2 - slope * number))
        # No other group shares a unit with the rest of a group that is cut.
        room = size - 1 if length <= unit_size else 0
        units.extend(
            (at, min(unit_size, first + length - at))
            for at in range(first, first + length, unit_size)
        )
    return units


def parse_header(line: bytes) -> dict[str, Any]:
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
        raise LookupError(f"its units or their order are not those of {count!r} items")
    for name in ("kinds", "numbers"):
        found = header.get(name, [0])
        if not isinstance(found, list) or {*map(type, found)} != {int}:
            raise TypeError(f"its {name} are not a list of numbers")
        if name in header and len(found) != count:
            raise LookupError(f"it has {len(found)} {name} of {count!r} items")
    wants, wanted = header.get("wants", []), header.get("wanted", [])
    if not {*map(type, wants)} <= {dict} or not {*map(type, wanted)} <= {int}:
        raise TypeError("its wants are not a list of objects, and a number for each unit")
    if wants and (len(wanted) != len(header["units"]) or not {*wanted} <= {*range(len(wants))}):
        raise LookupError(f"it has {len(wanted)} wants of {len(header['units'])} units")
    for name, kind in (("decision", dict), ("group_by", str), ("origins", list)):
        value = header.get(name)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"its {name} is {type(value).__name__}")
    return header


def _check_units(rows: list[list[int]], groups: int) -> int:
    """Check that units follow each other without a gap; return the number of their items."""
    first, behind, four = 0, -1, [int] * 4
    for row in rows:
        if list(map(type, row)) != four:
            raise TypeError(f"unit {row!r} is not four numbers")
        begin, count, at, group = row
        # A gap or an overlap would give an item the result of another item.
        if begin != first or count < 1 or at <= behind or (first == 0 and at != 0):
            raise LookupError(f"unit {row!r} does not begin where the one before ends")
        if not -1 <= group < max(1, groups):
            raise LookupError(f"unit {row!r} is of a group that is not there")
        first, behind = first + count, at
    return first


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

    def lines(self, unit: Unit) -> list[bytes]:
        """The JSON of a unit's items, without newlines. Raises RunError as :meth:`read`."""
        return self.read(unit)[0]

    def read(
        self, unit: Unit, *, fd: int | None = None
    ) -> tuple[list[bytes], list[dict[str, Any]]]:
        """The JSON of a unit's items, without newlines, and the items themselves.

        ``fd``: an open descriptor of this file. Raises RunError: lines are damaged; the message
        names the first one.
        """
        index = self._index(unit.first)
        start, end = self._starts[index : index + 2]
        own = files.closing(os.open(self.path, os.O_RDONLY)) if fd is None else nullcontext(fd)
        with own as opened:
            data = read_span(opened, start, end)
        lines = data.split(b"\n")[:-1]
        return lines, self._decode(unit, lines)

    def _decode(self, unit: Unit, lines: list[bytes]) -> list[dict[str, Any]]:
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
                yield from self.read(unit, fd=file.fileno())[0]

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

    def read(self, segment: Segment, unit: Unit) -> tuple[list[bytes], list[dict[str, Any]]]:
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


def claim_name(unit: str, generation: int) -> str:
    return f"{unit}.{generation}{_SUFFIX}"


def parse_claim(name: str) -> tuple[str, int] | None:
    """(unit, generation) of a claim's file name; None for any other file."""
    stem, dot, generation = name.removesuffix(_SUFFIX).rpartition(".")
    if not name.endswith(_SUFFIX) or not dot or not generation.isdigit():
        return None
    return stem, int(generation)


class Claims:
    """The claims of a stage that one process knows; an outdated view only costs repeated work."""

    def __init__(self, paths: StagePaths, *, local: bool = False) -> None:
        """``local``: the directory is on a filesystem of this kernel alone."""
        self._paths = paths
        self._local = local
        self._twins: dict[str, Path] = {}
        """The newest claim of each worker that claims through this object."""
        self.newest: dict[str, int] = {}
        """Highest generation seen of each claimed unit."""
        self._owners: dict[tuple[str, int], str] = {}

    def refresh(self) -> None:
        for name in files.list_names(self._paths.claims):
            # Nearly all claims are first ones, and a long list has tens of thousands.
            if name.endswith(_FIRST):
                self.newest.setdefault(name[: -len(_FIRST)], 1)
            elif (parsed := parse_claim(name)) is not None:
                self._note(*parsed)

    def _note(self, unit: str, generation: int) -> None:
        if generation > self.newest.get(unit, 0):
            self.newest[unit] = generation

    def generation(self, unit: str) -> int:
        """The newest generation seen; 0 if no worker claimed the unit."""
        return self.newest.get(unit, 0)

    def owner(self, unit: str, generation: int) -> str:
        """The worker that a claim names; "" if the claim cannot be read now."""
        key = (unit, generation)
        if key not in self._owners:
            with suppress(OSError):
                self._owners[key] = files.read_name(self._paths.claims / claim_name(*key))
        return self._owners.get(key, "")

    def create(self, unit: str, generation: int, worker: str) -> bool:
        """Claim a generation of a unit; return whether ``worker`` owns it.

        Raises OSError: the claim could not be created and does not exist.
        """
        path = self._paths.claims / claim_name(unit, generation)
        try:
            owner = files.create_name(path, worker, twin=self._twins.get(worker))
        except OSError:
            if not path.is_symlink() and not path.exists():
                raise
            # The claim exists but cannot be read: time its owner like a silent worker (rule R6).
            self._note(unit, generation)
            return False
        self._owners[unit, generation] = owner
        self._note(unit, generation)
        if owner == worker and self._local:
            self._twins[worker] = path
        return owner == worker

    def overtaken(self, unit: str, generation: int) -> bool:
        """Check the directory for a claim of the next generation."""
        path = self._paths.claims / claim_name(unit, generation + 1)
        if exists := path.is_symlink():
            self._note(unit, generation + 1)
        return exists
