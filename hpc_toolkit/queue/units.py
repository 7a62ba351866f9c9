"""Units, the items of one claim: a pure function of the groups, fixed when a segment is made, and
checked when its header is read, so that no item gets the result of another."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    groups: Sequence[int] | None, count: int, *, unit_size: int = MAX_UNIT, taper: bool = True
) -> list[tuple[int, int]]:
    """Cut ``count`` items into units: (first, count) of each, in order, without a gap.

    ``groups`` are the group index of each item, non-decreasing; None without groups. Without
    ``taper``, units have ``unit_size`` items up to the end of the list or of a group.
    """
    spans = None if groups is None else runs_of(groups)
    return cut_spans(spans, count, unit_size=unit_size, taper=taper)


def cut_spans(
    spans: Sequence[tuple[int, int]] | None,
    count: int,
    *,
    unit_size: int = MAX_UNIT,
    taper: bool = True,
) -> list[tuple[int, int]]:
    """Cut units as :func:`plan_units` does; ``spans`` are (first, count) of each group."""
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
