"""Stages that follow others: their items are made of the results of the stages before (rule R17).

Any worker adds them to the log, whose entries only one process can create. The header of a segment
names of what its items were made, so that nothing is made twice. An item contains the results that
it was made of, and keeps them if another line of the item before wins later. The stage is sealed
when the stages before are complete. A retry of these may add items even then.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.queue.items import Item, ItemLines, canonical, encode_segment
from hpc_toolkit.queue.log import damaged
from hpc_toolkit.queue.state import ItemState, UnitState
from hpc_toolkit.queue.wants import STAGES
from hpc_toolkit.rundir.journal import read_lines
from hpc_toolkit.rundir.layout import RESULTS, shown_item

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView, StageView

Ref = tuple[int, int]
"""(log entry of the segment, position in it): the identity of an item."""
Origin = Ref | str | int
"""Of what items are made: the item before, or the values of the keys ``by`` as JSON, or an item's
number in a list whose items follow each other (:mod:`hpc_toolkit.queue.graph`)."""


class Absent(NamedTuple):
    """An item that was not added yet, or is skipped."""

    item: Item
    skipped: bool
    causes: list[tuple[Item, Ref | None]]
    """The items that it waits for, or those that failed; None: not added."""


class Following:
    """Makes the items of one stage from what a view has read of the stages before it."""

    def __init__(self, view: RunView, stage: StageView, others: dict[str, Following]) -> None:
        self._stage, self._others = stage, others
        self._before = [view.stages[name] for name in stage.spec.after]
        self._read = {one.spec.name: _Reader(view, one) for one in self._before}
        self.wants = Counter({STAGES: 1})
        """The wants of items to come; in a graph, with their numbers."""
        self._taken = 0
        self._made: set[Origin] = set()
        self._news = self._before[0].state.watch() if stage.spec.by is None else set[str]()
        """Units of the stage before of which something new was read, if there is no ``by``."""
        self._open: dict[str, UnitState] = {}
        """Units with items that are done, and of which nothing was made yet."""
        self._known: tuple[list[int], dict[str, list[list[Ref]]]] = ([], {})
        self._since: dict[Origin, float] = {}
        """When this process first saw that items can be made."""

    def publish(self, now: float, patience_s: float = 0.0) -> bool:
        """Add the items that can be made, or the seal; return whether anything was added.

        Only what could be made ``patience_s`` seconds before ``now``: the worker that has the
        result comes first. Raises RunError: a segment or a journal is damaged.
        """
        log, spec = self._stage.log, self._stage.spec
        added = False
        # Waiting workers look often, and their looks cost the file server nothing before this.
        if self._ripe(now, patience_s) or (not log.sealed and self.is_over):
            self._stage.poll_log()
        while not log.hidden:
            ready = self._ripe(now, patience_s)
            items = [item for origin in ready for item in self._items(origin)]
            if not items:
                self._made.update(ready)  # lists without an element
                break
            lines = ItemLines(items, group_by=spec.group_by)
            lines.wants = self._wants_of(ready)
            size = spec.items_per_claim or self._unit_size(ready)
            body = encode_segment(
                lines, group_by=spec.group_by, items_per_claim=size, **self._named(ready)
            )
            left = partial(self._left_to_make, ready)
            added |= log.add_segment(body, revived=True, again=left)
            self._stage.poll_log()
        if not log.sealed and not log.hidden and self.is_over:
            log.seal()
            self._stage.poll_log()
            added = True
        return added

    def _left_to_make(self, origins: list[Any]) -> bool:
        """Whether no segment that was read has items of these origins."""
        self._note_made()
        return self._made.isdisjoint(origins)

    def _wants_of(self, _origins: list[Any]) -> list[str]:
        return []

    def _named(self, origins: list[Any]) -> dict[str, Any]:
        """What the header of a segment says of these origins."""
        return {"origins": [list(one) if isinstance(one, tuple) else one for one in origins]}

    def _ripe(self, now: float, patience_s: float) -> list[Origin]:
        """What items can be made of, if this was known ``patience_s`` seconds before ``now``."""
        self._note_made()
        self._since = since = {one: self._since.get(one, now) for one in self._ready()}
        return [one for one, at in since.items() if at <= now - patience_s]

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be made, unless items before are retried."""
        self._note_made()
        names = (stage.spec.name for stage in self._before)
        others = (self._others[name] for name in names if name in self._others)
        before = all(stage.complete for stage in self._before) and all(
            one.is_over for one in others
        )
        return before and next(self._ready(), None) is None

    def skipped(self) -> Iterator[Item]:
        """Items that are not made because one before has failed: what is known of each."""
        self._note_made()
        if self._stage.spec.by is None:
            (stage,) = self._before
            for ref in failed_items(stage):
                if ref not in self._made:
                    yield self._read[stage.spec.name].item(ref)
            yield from self._skipped_before()
            return
        names = {self._name(item) for item in self._skipped_before()}
        combinations = self._combinations()
        for stage in self._before if combinations else ():
            read = self._read[stage.spec.name]
            names.update({self._name(read.item(ref)) for ref in failed_items(stage)} - {None})
        if None in names:
            names.update(combinations)
        yield from (json.loads(one) for one in names - self._made if one is not None)

    def coming(self, expected: dict[str, int]) -> int:
        """How many items will still be made if no more fail, at least.

        ``expected`` has the number of items that each stage before has or will have. It is not
        known how many combinations of values, or elements of lists, there will be.
        """
        self._note_made()
        if self._stage.spec.by is not None:
            is_one = not self._stage.spec.by and not self._made
            return int(is_one and next(self.skipped(), None) is None)
        (stage,) = self._before
        failed = sum(ref not in self._made for ref in failed_items(stage))
        return max(0, expected[stage.spec.name] - failed - len(self._made))

    def rounds(self) -> list[list[Item]]:
        """Items that are known and will be added, each round after the one before."""
        return []

    def absent(self, text: str) -> Absent | None:
        """An item that is known and was not added, by its number, id or JSON."""

    def _skipped_before(self) -> Iterator[Item]:
        for stage in self._before:
            if stage.spec.name in self._others:
                yield from self._others[stage.spec.name].skipped()

    def _note_made(self) -> None:
        for entry, segment in self._stage.log.segments.items():
            if entry > self._taken:
                self._made.update(map(partial(_origin, segment.path), segment.origins))
        self._taken = self._stage.log.length

    def _ready(self) -> Iterator[Origin]:
        if self._stage.spec.by is None:
            yield from self._done()
            return
        if not all(
            self._others[one].is_over for one in self._stage.spec.after if one in self._others
        ):
            return
        combinations = self._combinations()
        left = [name for name in combinations if name not in self._made]
        skipped = {self._name(item) for item in self._skipped_before()} if left else set()
        for name in left if None not in skipped else ():
            refs = combinations[name]
            done = all(self._kind(stage, ref) is ItemState.DONE for stage, ref in self._each(refs))
            if done and name not in skipped:
                yield name

    def _done(self) -> Iterator[Ref]:
        """Items before that are done, and of which nothing was made yet."""
        (stage,) = self._before
        if self._news:
            self._open.update((name, stage.state.units[name]) for name in self._news)
            in_order = sorted(self._open.values(), key=lambda one: (one.unit.entry, one.unit.first))
            self._open = {one.unit.name: one for one in in_order}
            self._news.clear()
        for name, state in list(self._open.items()):
            entry = state.unit.entry
            done = [
                (entry, position)
                for position in stage.state.touched(state)
                if (entry, position) not in self._made
                and stage.state.item_state(state, position) is ItemState.DONE
            ]
            yield from done
            if not done:
                self._open.pop(name, None)

    def _combinations(self) -> dict[str, list[list[Ref]]]:
        """The items of each combination of the values of ``by``; none until all are known."""
        if not all(stage.log.sealed for stage in self._before):
            return {}
        lengths = [len(stage.log.segments) for stage in self._before]
        if self._known[0] != lengths:
            found: dict[str, list[list[Ref]]] = {}
            if not self._stage.spec.by:
                found["{}"] = [[] for _ in self._before]
            for number, stage in enumerate(self._before):
                reader = self._read[stage.spec.name]
                segments = stage.log.segments.items()
                for ref in ((at, one) for at, some in segments for one in range(some.count)):
                    if (name := self._name(reader.item(ref))) is not None:
                        found.setdefault(name, [[] for _ in self._before])[number].append(ref)
            self._known = lengths, found
        return self._known[1]

    def _name(self, item: Item) -> str | None:
        """The values of the keys ``by`` as JSON; None if the item does not have them all."""
        by = self._stage.spec.by or ()
        if not item.keys() >= set(by):
            return None
        return canonical({key: item[key] for key in by}).decode()

    def _each(self, refs: list[list[Ref]]) -> Iterable[tuple[StageView, Ref]]:
        return (
            (stage, one) for stage, some in zip(self._before, refs, strict=True) for one in some
        )

    def _unit_size(self, origins: list[Origin]) -> int | None:
        """Items of one claim: as many as the largest unit of items before, which get smaller."""
        counts = (
            _unit(self._before[0], one).unit.count for one in origins if isinstance(one, tuple)
        )
        return max(counts, default=None)

    @staticmethod
    def _kind(stage: StageView, ref: Ref) -> ItemState:
        return stage.state.item_state(_unit(stage, ref), ref[1])

    def _items(self, origin: Origin) -> list[Item]:
        """The items that are made of one origin."""
        if isinstance(origin, tuple):
            (stage,) = self._before
            reader = self._read[stage.spec.name]
            return _made_of(
                stage.spec.name,
                reader.item(origin),
                reader.result(origin),
                expand=stage.spec.expand,
            )
        assert isinstance(origin, str)
        made: Item = json.loads(origin)
        kept: list[list[Any]] = []
        for stage in self._before:
            made[stage.spec.name] = []
        for stage, ref in self._each(self._combinations()[origin]):
            name, reader = stage.spec.name, self._read[stage.spec.name]
            result, rows, item = reader.result(ref), made[name], reader.item(ref)
            if stage.spec.by is None:
                kept += [[[name, len(rows), "item", *one[0]], *one[1:]] for one in _kept(item)]
            if types := result.get("types"):
                kept.append([[name, len(rows), "value"], result["worker"], types])
            # Without the rows of earlier combinations, which would be repeated in each of these.
            own = (
                shown_item(item)
                if stage.spec.by is None
                else {key: item[key] for key in stage.spec.by}
            )
            rows.append({"item": own, "value": result["value"]})
        return [with_places(made, kept)]


class _Reader:
    """Reads items of a stage and their results; keeps those of the last unit."""

    def __init__(self, view: RunView, stage: StageView) -> None:
        self._view, self._stage = view, stage
        self._items: tuple[str, list[Item]] = ("", [])
        self._lines: tuple[Any, dict[int, dict[str, Any]]] = (None, {})

    def item(self, ref: Ref) -> Item:
        unit = _unit(self._stage, ref).unit
        if self._items[0] != unit.name:
            self._items = unit.name, self._stage.log.segments[unit.entry].read(unit)[1]
        return self._items[1][ref[1] - unit.first]

    def result(self, ref: Ref) -> dict[str, Any]:
        """The record of a done item, with its worker."""
        state, position = _unit(self._stage, ref), ref[1]
        if state.clean is not None:
            where = state.clean[:3]
        else:
            history = state.histories.get(position)
            if history is None or history.done is None:
                return self._in_table(ref)  # a power loss took its line
            where = history.done[1:]
        if self._lines[0] != where:
            path, name = (
                self._view.paths.journal(where[0]),
                f"{self._stage.spec.name}/{state.unit.name}",
            )
            found = {
                line.record["item"]: {**line.record, "worker": where[0]}
                for line in read_lines(path, *where[1:], of=name)
                if line.record["type"] == "done"
            }
            self._lines = where, found
        record = self._lines[1].get(position)
        if record is None:
            path = self._view.paths.journal(where[0])
            raise damaged(path, f"bytes {where[1]} to {where[2]} have no result")
        return record

    def _in_table(self, ref: Ref) -> dict[str, Any]:
        assert self._stage.log.table is not None
        path = self._stage.paths.root / self._stage.log.table[1]
        with path.open("rb") as file:
            next(file)  # the header
            rows = (json.loads(line) for line in file)
            return next(row for row in rows if row.get("at") == list(ref))


def _origin(path: Path, given: Any) -> Origin:
    if isinstance(given, str):
        return given
    if isinstance(given, list) and list(map(type, given)) == [int, int]:
        return given[0], given[1]
    raise damaged(path, f"line 1: {given!r} is of no item before")


def _made_of(name: str, item: Item, result: dict[str, Any], *, expand: bool) -> list[Item]:
    """The items that follow one item: it and its result, or each element of that."""
    value, types, worker = result["value"], result.get("types") or {}, result["worker"]
    before, item = _kept(item), shown_item(item)
    if not (expand and isinstance(value, list)):
        kept = [*before, [[name], worker, types]] if types else before
        return [with_places({**item, name: value}, kept)]
    made = []
    for number, one in enumerate(value):
        place = f"/{number}"
        own = {
            key.removeprefix(place): tag
            for key, tag in types.items()
            if key == place or key.startswith(f"{place}/")
        }
        is_item = isinstance(one, dict) and "" not in own
        where: list[Any] = [] if is_item else [name]
        kept = [*before, [where, worker, own]] if own else before
        made.append(with_places({**item, **(one if is_item else {name: one})}, kept))
    return made


def with_places(item: Item, kept: list[list[Any]]) -> Item:
    """The item, with what it takes to restore the results in it."""
    return {**item, "stored": {RESULTS: kept}} if kept else item


def _kept(item: Item) -> list[list[Any]]:
    kept = item.get("stored")
    return list(kept[RESULTS]) if type(kept) is dict and kept.keys() == {RESULTS} else []


def _unit(stage: StageView, ref: Ref) -> UnitState:
    entry, position = ref
    found = stage.log.segments[entry]
    return stage.state.units[found.unit_of(position).name]


def failed_items(stage: StageView) -> Iterator[Ref]:
    state = stage.state
    # Without a table only a line shows a failure, and few of many units have such lines.
    names = sorted(state.begun) if stage.log.table is None else state.units
    for unit in [state.units[name] for name in names]:
        for position in list(state.touched(unit)) if unit.clean is None else ():
            if state.item_state(unit, position) is ItemState.FAILED:
                yield unit.unit.entry, position
