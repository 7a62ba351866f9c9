"""A list whose items follow single items of it: its edges, and their file ``graph.jsonl``.

The file has the edges, by the numbers of the items in the list, and the items themselves. An item
is added to the log when all items before it are done (:mod:`hpc_toolkit.queue.followingitems`).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from hpc_toolkit.errors import near_miss
from hpc_toolkit.queue.items import Item, ItemLines, encode_segment
from hpc_toolkit.queue.log import StageLog, damaged
from hpc_toolkit.queue.wants import changed, refuse
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RESULTS, StageSpec
from hpc_toolkit.system.jsonlines import batches, decode_each, encode

GRAPH = "graph.jsonl"
_ID, _AFTER = "id", "after"
_CHUNK = 256
"""Items between two known offsets in the file."""
_SHOWN = 10
_MOST_NAMES = 10_000
"""Ids among which a similar one is looked for, which takes a second for each 100,000."""


class Arrows:
    """Takes ``after`` out of the items of a list, if there are items with an id and such a list."""

    def __init__(self) -> None:
        self.count = array("I")
        """Number of items before each item, for those up to the last item that follows others."""
        self.before = array("I")
        """The ids before all items, one after another, as numbers of names."""
        self.names: dict[str, int] = {}
        self._other: int | None = None
        """The first item whose ``after`` is not a list."""

    def __bool__(self) -> bool:
        return bool(self.count)

    def taken(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items without ``after``. Raises ItemsError: it is neither a list of ids nor left."""
        return changed(items, _AFTER, self._without)

    def _without(self, number: int, item: Any) -> Any:
        if not isinstance(item, dict) or _AFTER not in item:
            return item
        after = item[_AFTER]
        if type(after) is not list or _ID not in item:
            self._other = number if self._other is None else self._other
            return item
        for one in after:
            if not _is_id(one):
                wrong = f"'after' has {one!r:.80}, which cannot be an id"
                refuse(number, wrong, "ids are text or whole numbers")
        self.count.extend([0] * (number - len(self.count)))
        numbers = [self.names.setdefault(str(one), len(self.names)) for one in after]
        before = dict.fromkeys(numbers)
        self.count.append(len(before))
        self.before.extend(before)
        return {key: value for key, value in item.items() if key != _AFTER}

    def graph(self, lines: ItemLines, *, results: bool) -> GraphLines:
        """The list with its edges.

        Raises ItemsError: an id is missing, unknown or not unique, or items wait for each other.
        """
        if self._other is not None:
            hint = 'such as {"id": "c", "after": ["a", "b"]}; give the key another name otherwise'
            refuse(self._other, "its 'after' is not a list of ids, or it has no 'id'", hint)
        self.count.extend([0] * (len(lines) - len(self.count)))
        where = self._where(lines.lines, results=results)
        unknown = {number for name, number in self.names.items() if where[number] < 0}
        if unknown:
            at = next(at for at, one in enumerate(self.before) if one in unknown)
            starts = accumulate(self.count)
            number = next(number for number, end in enumerate(starts) if at < end)
            name = next(name for name, one in self.names.items() if one == self.before[at])
            known = [one for one, of in self.names.items() if where[of] >= 0]
            hint = near_miss(name, known) if len(known) <= _MOST_NAMES else "check its spelling"
            refuse(number, f"it follows {name!r}, and no item has this id", hint)
        before = array("I", [where[one] for one in self.before])
        found = GraphLines(lines, self.count, before, results=results)
        found.refuse_circle()
        return found

    def _where(self, lines: list[bytes], *, results: bool) -> array[int]:
        """The number of the item that has each id; -1 for ids without an item."""
        names = self.names
        where = array("q", [-1]) * len(names)
        for number, item in enumerate(one for some in batches(lines) for one in decode_each(some)):
            if not _is_id(item.get(_ID)):
                hint = "give each item an 'id', which is text or a whole number"
                refuse(number, "it has no 'id', and others follow items by their ids", hint)
            if results and RESULTS in item:
                refuse(
                    number,
                    f"it has the key {RESULTS!r}, which gets the results of items before",
                    "give the key another name",
                )
            at = names.setdefault(str(item[_ID]), len(names))
            if at == len(where):
                where.append(-1)
            if where[at] >= 0:
                wrong = f"its id {item[_ID]!r} is that of item {where[at]}"
                refuse(number, wrong, "give each item another id")
            where[at] = number
        return where


def _is_id(value: object) -> bool:
    return isinstance(value, str) or type(value) is int


class Edges:
    """Which item follows which, by their numbers: 4 bytes for an edge, and for an item."""

    def __init__(self, count: Sequence[int], before: array[int]) -> None:
        self.starts = array("I", accumulate(count, initial=0))
        self.before = before

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, number: int) -> array[int]:
        return self.before[self.starts[number] : self.starts[number + 1]]

    def turned(self) -> Edges:
        """The edges in the other direction: which items follow an item."""
        count = [0] * len(self)
        for one in self.before:
            count[one] += 1
        turned = Edges(count, array("I", bytes(self.before.itemsize * len(self.before))))
        at = array("I", turned.starts)
        for number in range(len(self)):
            for one in self.of(number):
                turned.before[at[one]] = number
                at[one] += 1
        return turned

    def left(self) -> array[int]:
        """The number of items before each item."""
        starts = self.starts
        return array("I", [starts[at + 1] - starts[at] for at in range(len(self))])


class GraphLines(ItemLines):
    """A list with its edges, as :class:`Arrows` read it."""

    def __init__(
        self, given: ItemLines, count: Sequence[int], before: array[int], *, results: bool
    ) -> None:
        super().__init__(group_by=given.group_by)
        self.lines, self.groups, self.labels = given.lines, given.groups, given.labels
        self.wants = given.wants
        self._count, self.results = count, results
        self._edges = Edges(count, before)

    def refuse_circle(self) -> None:
        """Raise ItemsError if items wait for each other; it names them."""
        left, after = self._edges.left(), self._edges.turned()
        free = [number for number, count in enumerate(left) if not count]
        for number in free:
            for one in after.of(number):
                left[one] -= 1
                if not left[one]:
                    free.append(one)
        if len(free) == len(left):
            return
        number, seen = next(at for at, count in enumerate(left) if count), dict[int, None]()
        while number not in seen:
            seen[number] = None
            number = next(one for one in self._edges.of(number) if left[one])
        circle = [*seen][[*seen].index(number) :]
        first = circle.index(min(circle))
        circle = [*circle[first:], *circle[: first + 1]]
        names = [str(json.loads(self.lines[one])[_ID]) for one in circle[:_SHOWN]]
        more = f" and {len(circle) - 1 - _SHOWN} more" if len(circle) > _SHOWN else ""
        wrong = f"items wait for each other: {' after '.join(names)}{more}"
        refuse(circle[0], wrong, "remove one of these ids from 'after'")

    def publish(self, log: StageLog, stage: StageSpec) -> None:
        """Write the graph, and add the items that follow none; for a run that is being created."""
        files.write_new(log.paths.root / GRAPH, self._file())
        roots = [number for number, count in enumerate(self._count) if not count]
        given = ItemLines(group_by=self.group_by)
        more = encode({RESULTS: {}})[1:].encode()
        given.lines = [self.lines[one] for one in roots]
        if self.results:
            given.lines = [line[:-1] + b"," + more for line in given.lines]
        given.wants = self.wants and [self.wants[one] for one in roots]
        given.labels = self.labels
        if self.group_by is not None:
            given.groups = array("l", [self.groups[one] for one in roots])
        log.add_segment(
            encode_segment(
                given, group_by=stage.group_by, items_per_claim=stage.items_per_claim, numbers=roots
            )
        )

    def _file(self) -> Iterator[bytes]:
        sizes = accumulate((len(line) + 1 for line in self.lines), initial=0)
        header = {
            "format": 1,
            "results": self.results,
            "count": list(self._count),
            "before": list(self._edges.before),
            "at": [at for number, at in enumerate(sizes) if number % _CHUNK == 0],
        }
        if self.wants:
            number = {want: at for at, want in enumerate(dict.fromkeys(self.wants))}
            header["wants"] = [json.loads(want) for want in number]
            header["wanted"] = [number[want] for want in self.wants]
        yield encode(header).encode() + b"\n"
        for some in batches(self.lines):
            yield b"".join(b"%b\n" % line for line in some)


class Graph:
    """The graph of a stage, read from its file; items are read one at a time."""

    def __init__(self, path: Path) -> None:
        """Raises RunError: it is damaged or missing; OSError."""
        self.path = path
        try:
            with path.open("rb") as file:
                first = file.readline()
            self._body = len(first)
            header = json.loads(first)
            self.results = bool(header["results"])
            self.edges = Edges(header["count"], array("I", header["before"]))
            self._at = array("Q", header["at"])
            wants = [encode(one) for one in header.get("wants", ())]
            self.wants = [wants[one] for one in header.get("wanted", ())]
            """The want of each item (:mod:`hpc_toolkit.queue.wants`); [] if none has one."""
            edges = len(self.edges.before)
            if edges != self.edges.starts[-1] or max(self.edges.before, default=-1) >= len(self):
                raise LookupError("its counts are not those of its edges")
        except (ValueError, LookupError, TypeError, OverflowError, FileNotFoundError) as error:
            raise damaged(path, f"line 1: {type(error).__name__}: {error}") from error
        self._read: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        return len(self.edges)

    def line(self, number: int) -> bytes:
        """The JSON of an item. Raises RunError: it is damaged."""
        chunk, at = divmod(number, _CHUNK)
        if self._read[0] != chunk:
            start, more = self._at[chunk], self._at[chunk + 1 : chunk + 2]
            with self.path.open("rb") as file:
                file.seek(self._body + start)
                data = file.read(more[0] - start if more else -1)
            self._read = chunk, data.split(b"\n")
        return self._read[1][at]

    def item(self, number: int) -> Item:
        try:
            item: Item = json.loads(self.line(number))
            item[_ID]
        except (ValueError, LookupError, TypeError) as error:
            raise damaged(self.path, f"line {number + 2}: {error}") from error
        return item
