"""Verify results: one row per item, no failures, and values in range."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.items import Item
from hpc_toolkit.rundir.values import Types, not_finite, steps

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row

KINDS = (
    *("missing", "unexpected", "duplicate", "failed"),
    *("out of range", "not finite", "not unique"),
)
"""Kinds of problems, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with the rows."""

    kind: str
    """One of :data:`KINDS`."""
    what: str
    """Description for people; "" if the kind says enough."""
    item: Item
    """The item whose row, or missing row, it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range in which a number of every result must be."""

    name: str
    """Key in the value; a dot leads into a nested object."""
    least: float = -math.inf
    most: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Range:
        """Read ``mean=-1:1``; an end may be left out. Raises ConfigError: it is not a range."""
        name, equals, ends = text.partition("=")
        least, colon, most = ends.partition(":")
        with contextlib.suppress(ValueError):
            found = cls(name=name, least=float(least or "-inf"), most=float(most or "inf"))
            if name and equals and colon and found.least <= found.most:
                return found
        message = f"--range {text!r} is not KEY=LEAST:MOST"
        raise ConfigError(message, hint="such as --range mean=-1:1, or --range loss=0:")


def verify(
    rows: list[Row],
    items: list[Item] | None,
    *,
    ranges: tuple[Range, ...] = (),
    unique: tuple[str, ...] = (),
) -> list[Problem]:
    """Find the problems of rows.

    Each of ``items`` must have one row; None if they are not known. ``unique`` are keys of the
    item, or else of the value, whose values no two rows share.
    """
    problems = list(_counted(rows, items))
    for row in rows:
        if row["state"] != "done":
            problems.append(Problem("failed", row["error"] or "", row["item"]))
            continue
        problems += [
            Problem("not finite", f"{path} is {number}", row["item"])
            for path, number in (*_numbers(row["value"]), *_replaced(row.get("types", {})))
            if not math.isfinite(number)
        ]
        problems += [found for one in ranges if (found := _outside(row, one)) is not None]
    for name in unique:
        problems += _repeated(rows, name)
    return sorted(problems, key=lambda problem: KINDS.index(problem.kind))


def _counted(rows: list[Row], items: list[Item] | None) -> Iterator[Problem]:
    counts = Counter(_key(row["item"]) for row in rows)
    if items is not None:
        known = {_key(item) for item in items}
        yield from (Problem("missing", "", item) for item in items if _key(item) not in counts)
        for row in rows:
            if _key(row["item"]) not in known:
                yield Problem("unexpected", "", row["item"])
    for row in rows:
        count = counts.pop(_key(row["item"]), 1)
        if count > 1:
            yield Problem("duplicate", f"{count} rows", row["item"])


def _key(item: Item) -> str:
    return json.dumps(item, sort_keys=True)


def _numbers(value: Any, path: str = "value") -> Iterator[tuple[str, float]]:
    """All floats of a value, each with its path."""
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}[{index}]")


def _replaced(types: Types) -> Iterator[tuple[str, float]]:
    """The numbers that JSON does not have, each with its path."""
    for place, number in not_finite(types).items():
        yield (
            "value" + "".join(f"[{s}]" if s.isdecimal() else f".{s}" for s in steps(place)),
            number,
        )


def _get(record: Any, name: str) -> Any:
    """The value under a key, or under a path of keys with dots; None if there is none."""
    if not isinstance(record, dict):
        return None
    first, _, rest = name.partition(".")
    return record[name] if name in record else _get(record.get(first), rest)


def _named(row: Row) -> Any:
    """The value, under the name of its column if it is not a dict."""
    return row["value"] if isinstance(row["value"], dict) else {"value": row["value"]}


def _outside(row: Row, wanted: Range) -> Problem | None:
    number = _get(_named(row), wanted.name)
    if isinstance(number, bool) or not isinstance(number, int | float):
        return Problem("out of range", f"{wanted.name} is {json.dumps(number)}", row["item"])
    if not wanted.least <= number <= wanted.most:
        ends = f"{wanted.least:g}:{wanted.most:g}"
        return Problem("out of range", f"{wanted.name} is {number}, not in {ends}", row["item"])
    return None


def _repeated(rows: list[Row], name: str) -> Iterator[Problem]:
    seen: dict[str, Item] = {}
    for row in rows:
        found = _get(row["item"], name)
        found = _get(_named(row), name) if found is None else found
        if found is None:
            if row["state"] == "done":
                yield Problem("not unique", f"there is no {name}", row["item"])
            continue
        text = json.dumps(found, sort_keys=True)
        if text in seen:
            what = f"{name} is {text} as in {json.dumps(seen[text])}"
            yield Problem("not unique", what, row["item"])
        seen.setdefault(text, row["item"])
