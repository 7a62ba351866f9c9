"""A list whose items follow single items of it: its edges, their file, and what can be added.

The file ``graph.jsonl`` has the edges, by the numbers of the items in the list, and the items
themselves. An item is added to the log when all items before it are done (rule R17).
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.following import Absent, Following, Ref, failed_items, with_places
from hpc_toolkit.queue.items import Item, ItemLines, encode_segment
from hpc_toolkit.queue.log import StageLog, damaged
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.wants import STAGES, refuse
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RESULTS, StageSpec
from hpc_toolkit.system.jsonlines import batches, encode

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView, StageView

GRAPH = "graph.jsonl"
_ID = "id"
_CHUNK = 256
"""Items between two known offsets in the file."""
_SHOWN = 10


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
    """A list with its edges, as :class:`hpc_toolkit.queue.wants.Arrows` read it."""

    def __init__(
        self, given: ItemLines, count: Sequence[int], before: array[int], *, results: bool
    ) -> None:
        super().__init__(group_by=given.group_by)
        self.lines, self.groups, self.labels = given.lines, given.groups, given.labels
        self.wants = given.wants
        self._count, self.results = count, results
        self._edges = Edges(count, before)
        self._refuse_circle()

    def _refuse_circle(self) -> None:
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


def following(view: RunView) -> dict[str, Following]:
    """The stages of a run whose items follow others, in their order."""
    found: dict[str, Following] = {}
    for name, stage in view.stages.items():
        if stage.spec.after:
            kind = FollowingItems if stage.spec.after == (name,) else Following
            found[name] = kind(view, stage, found)
    return found


class FollowingItems(Following):
    """Adds the items of a list of which all items before are done."""

    def __init__(self, view: RunView, stage: StageView, others: dict[str, Following]) -> None:
        super().__init__(view, stage, others)
        self.graph = graph = Graph(stage.paths.root / GRAPH)
        self._after = graph.edges.turned()
        self._left = graph.edges.left()
        """Number of items before each item that are not done."""
        self._entry = array("I", bytes(4 * len(graph)))
        """Log entry of each item's segment; 0: the item was not added yet."""
        self._position = array("I", bytes(4 * len(graph)))
        self._is_done = bytearray(len(graph))
        self._free = {number for number, count in enumerate(self._left) if not count}
        """Items that can be added."""
        self._added = 0
        self.wants = Counter(graph.wants or [STAGES])

    def _note_made(self) -> None:
        log, state = self._stage.log, self._stage.state
        for entry in range(self._taken + 1, log.length + 1):
            segment = log.segments.get(entry)
            if segment is None:
                continue
            if segment.numbers is None:
                raise damaged(segment.path, "line 1: it does not say of which items it is")
            self._added += segment.count
            self.wants.subtract(self._wants_of(segment.numbers))
            for position, number in enumerate(segment.numbers):
                self._entry[number], self._position[number] = entry, position
            self._free.difference_update(segment.numbers)
        self._taken = log.length
        while self._news:
            unit = state.units[self._news.pop()]
            numbers = log.segments[unit.unit.entry].numbers or ()
            for position in list(state.touched(unit)):
                number = numbers[position]
                if not self._is_done[number] and state.item_state(unit, position) is ItemState.DONE:
                    self._is_done[number] = 1
                    self._note_done(number)

    def _note_done(self, number: int) -> None:
        for one in self._after.of(number):
            self._left[one] -= 1
            if not self._left[one] and not self._entry[one]:
                self._free.add(one)

    def _ready(self) -> Iterator[int]:
        yield from sorted(self._free)

    def _left_to_make(self, origins: list[Any]) -> bool:
        self._note_made()
        return self._free.issuperset(origins)

    def _unit_size(self, origins: list[Any]) -> None:
        """Units as in a list of these items."""

    def _wants_of(self, origins: list[Any]) -> list[str]:
        return self.graph.wants and [self.graph.wants[one] for one in origins]

    def _named(self, origins: list[Any]) -> dict[str, Any]:
        return {"numbers": origins}

    def _items(self, origin: Any) -> list[Item]:
        item = self.graph.item(origin)
        if not self.graph.results:
            return [item]
        found: dict[str, Any] = {}
        kept: list[list[Any]] = []
        reader = self._read[self._stage.spec.name]
        for one in self.graph.edges.of(origin):
            result = reader.result((self._entry[one], self._position[one]))
            name = str(self.graph.item(one)["id"])
            found[name] = result["value"]
            if types := result.get("types"):
                kept.append([[RESULTS, name], result["worker"], types])
        return [with_places({**item, RESULTS: found}, kept)]

    @property
    def is_over(self) -> bool:
        self._note_made()
        return not self._free and not self._stage.state.open

    def _skipped_numbers(self) -> set[int]:
        """Items that follow a failed one, directly or not."""
        self._note_made()
        segments = self._stage.log.segments
        failed = [
            (segments[entry].numbers or ())[position]
            for entry, position in failed_items(self._stage)
        ]
        found: set[int] = set()
        while failed:
            new = set(self._after.of(failed.pop())) - found
            found |= new
            failed += new
        return {number for number in found if not self._entry[number]}

    def skipped(self) -> Iterator[Item]:
        yield from map(self.graph.item, sorted(self._skipped_numbers()))

    def coming(self, expected: dict[str, int]) -> int:
        skipped = len(self._skipped_numbers())
        return len(self.graph) - self._added - skipped

    def rounds(self) -> list[list[Item]]:
        """The items that will be added if no more fail; each round follows the one before."""
        skipped, left = self._skipped_numbers(), array("I", self._left)
        done = [at for at in range(len(self.graph)) if self._entry[at] and not self._is_done[at]]
        new = sorted(self._free)
        rounds: list[list[Item]] = []
        while done or new:
            for one in (one for number in done for one in self._after.of(number)):
                left[one] -= 1
                if not left[one] and one not in skipped:
                    new.append(one)
            if new:
                rounds.append([self.graph.item(one) for one in sorted(new)])
            done, new = new, []
        return rounds

    def absent(self, text: str) -> Absent | None:
        self._note_made()
        wanted = None
        for number in (at for at in range(len(self.graph)) if not self._entry[at]):
            item = self.graph.item(number)
            if text in (str(number), str(item["id"]), encode(item["id"])):
                wanted = number
                break
            if wanted is None and text in encode(item):
                wanted = number
        if wanted is None:
            return None
        skipped = wanted in self._skipped_numbers()
        causes = self._failed(wanted) if skipped else self.graph.edges.of(wanted)
        left = [one for one in sorted(causes) if not self._is_done[one]]
        found = [(self.graph.item(one), self._ref(one)) for one in left]
        return Absent(self.graph.item(wanted), skipped, found)

    def _ref(self, number: int) -> Ref | None:
        return (self._entry[number], self._position[number]) if self._entry[number] else None

    def _failed(self, number: int) -> set[int]:
        """The failed items that an item follows, directly or not."""
        stack, seen, found = [number], {number}, set[int]()
        while stack:
            for one in self.graph.edges.of(stack.pop()):
                ref = self._ref(one)
                if ref is not None and self._kind(self._stage, ref) is ItemState.FAILED:
                    found.add(one)
                elif ref is None and one not in seen:
                    seen.add(one)
                    stack.append(one)
        return found
