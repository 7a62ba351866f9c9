"""What items can be added to a stage; here, in a list whose items follow each other (rule R17)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.following import Absent, Following, Ref, failed_items, with_places
from hpc_toolkit.queue.graph import GRAPH, Graph
from hpc_toolkit.queue.items import Item
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.queue.state import ItemState
from hpc_toolkit.queue.wants import STAGES
from hpc_toolkit.rundir.layout import RESULTS
from hpc_toolkit.system.jsonlines import encode

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView, StageView


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
