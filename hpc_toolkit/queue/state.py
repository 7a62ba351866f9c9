"""The state of every item, computed from journal lines and a log prefix (rules R7, R8, R11).

Nearly all units are finished by one worker in one clean unit run and are kept as that. Only
the others are kept item by item. This module itself reads and writes no files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_toolkit.queue.control import SILENT_NODE
from hpc_toolkit.rundir.journal import Line, UnitRun
from hpc_toolkit.system.record import Record, fresh

if TYPE_CHECKING:
    from hpc_toolkit.queue.units import Unit

_KEPT = 1024
_NONE: Any = MappingProxyType({})
"""Instead of a dictionary for each of tens of thousands of units."""
DEATH_WEIGHT = 2
"""Weight of a dead executor: one item may kill many executors before it is given up."""
AGAIN_WEIGHT = 7
"""Weight of a repeated failure of an item: with the first one as much as 8 failures in a row, so
that another host is asked to try the item before its last attempt is used up on the same host."""


class ConsecutiveFailures(Record, frozen=False):
    """One worker's failures since its last result."""

    done_at: float = float("-inf")
    """Epoch seconds of that result."""
    failed: dict[tuple[str, int], tuple[float, int]] = fresh(factory=dict)
    """(Unit, item) -> when it last failed or killed its executor, and the weight of all times."""

    def note_done(self, at: float) -> None:
        if at < self.done_at:
            return  # a unit run is being read a second time
        self.done_at = at
        if self.failed:
            self.failed = {item: one for item, one in self.failed.items() if one[0] > at}

    def note_failure(self, unit: str, record: dict[str, Any], *, died: bool) -> None:
        key, at = (unit, record["item"]), record["at"]
        if at < self.done_at:
            return
        before = self.failed.pop(key, (0.0, 0))[1]
        self.failed[key] = at, before + (DEATH_WEIGHT if died else AGAIN_WEIGHT if before else 1)
        if len(self.failed) > _KEPT:
            del self.failed[next(iter(self.failed))]


class ItemState(StrEnum):
    """State of an item, the same for every process that sees the same files."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Ref(NamedTuple):
    """Position of a journal line; of two, the smaller one is the winner (R11)."""

    generation: int
    worker: str
    start: int
    end: int


class History(Record, frozen=False):
    """All lines of one item."""

    done: Ref | None
    """The winning done line."""
    done_lines: int
    """Number of done lines; all but one are duplicates."""
    failures: dict[int, Ref]
    """Generation -> a failure of that generation, a permanent failure if there is any."""
    permanent: set[int]
    """Generations with a permanent failure."""
    short: Collection[int]
    """Those of ``failures`` in which the item ran out of what it gets more of (rule R18)."""
    steps: int
    """How many of ``short`` do not count as attempts, because the item then gets more."""

    def __init__(self, steps: int) -> None:  # spelled out because a run may have 100,000 of these
        self.done, self.done_lines = None, 0
        self.failures, self.permanent, self.short, self.steps = {}, set(), (), steps

    def state(self, *, floor: int, max_attempts: int) -> ItemState:
        """State by rule R8, if failures up to generation ``floor`` were lifted."""
        if self.done is not None:
            return ItemState.DONE
        permanent = any(generation > floor for generation in self.permanent)
        failed = permanent or self.attempts(floor) >= max_attempts
        return ItemState.FAILED if failed else ItemState.PENDING

    def attempts(self, floor: int) -> int:
        return sum(generation > floor for generation in self.failures) - self.growth(floor)

    def growth(self, floor: int, before: float = math.inf) -> int:
        """How often the needs of the item grew, in generations after ``floor``."""
        return min(sum(floor < generation < before for generation in self.short), self.steps)

    def note_failure(self, ref: Ref, *, short: bool, permanent: bool) -> None:
        generation, known = ref.generation, self.failures.get(ref.generation)
        # Two names of one worker may have written a failure: as in R11, the older line counts.
        if known is None or (permanent, known) > (generation in self.permanent, ref):
            self.failures[generation] = ref
        self.permanent.update((generation,) if permanent else ())
        # Lines of one generation may differ, and are read in any order.
        if not short and self.short:
            self.short = tuple(one for one in self.short if one != generation)
        elif short and known is None:
            self.short = (*self.short, generation)

    def last_failure(self, floor: int) -> Ref | None:
        """The failure to show: a permanent one, else that of the highest counting generation."""
        counting = [generation for generation in self.failures if generation > floor]
        last = max(self.permanent.intersection(counting) or counting, default=0)
        return self.failures.get(last)


class Death(Record, frozen=False):
    """A generation whose worker or executor died."""

    item: int
    """The suspect: the pending item that was first in the order of the dead process."""
    explained: str
    host: str
    alone: bool
    """Whether the suspect was the only pending item of its unit, or all of them were suspects."""
    worker: str
    evidence: str


class UnitState(Record, frozen=False):
    """What is known about the items of one unit."""

    unit: Unit
    clean: tuple[str, int, int, int] | None
    """The unit run that did every item, if no other attempts are known: its worker, the bytes of
    the journal at which its lines begin and end, and their CRC-32."""
    histories: dict[int, History]
    """Histories by position, if the unit is kept item by item."""
    released: tuple[int, ...]
    """Generations that their owner released."""
    deaths: dict[int, Death]
    """Deaths by generation; several lines about one generation count once."""

    def __init__(self, unit: Unit) -> None:  # as above
        self.unit, self.clean = unit, None
        self.histories, self.released, self.deaths = _NONE, (), _NONE

    def release(self, generation: int) -> None:
        if generation not in self.released:
            self.released += (generation,)

    def lacks(self, record: dict[str, Any]) -> bool:
        """Whether a line names an item that is not in this unit, so it does not count."""
        return record["type"] != "release" and record["item"] not in self.unit.items


class StageState:
    """The state of one stage, as far as its journal lines were read."""

    def __init__(
        self,
        *,
        max_attempts: int,
        floors: dict[tuple[int, int], int],
        expand: Callable[[str, int, int], Iterable[Line]],
        short: str = "",
        steps: Callable[[Unit], int] = lambda _unit: 0,
    ) -> None:
        """``short``: why an item failed that gets more then; ``steps``: how often it gets more."""
        self.max_attempts, self._floors, self._expand = max_attempts, floors, expand
        self._short, self._steps = short, steps
        self.units: dict[str, UnitState] = {}
        self.consecutive_failures = defaultdict[str, ConsecutiveFailures](ConsecutiveFailures)
        """Failures of each worker that wrote an attempt."""
        self.begun: set[str] = set()
        """Units of which lines were read, other than those that one clean unit run finished."""
        self.deaths = 0
        """Generations whose worker or executor died."""
        self._open: set[str] = set()
        self._unjudged: set[str] = set()
        self._orphans: dict[str, list[tuple[str, Line | UnitRun]]] = {}
        self._published: dict[int, set[int]] = {}
        self._watched: list[set[str]] = []
        self._retried: Callable[[int, int], bool] = lambda _entry, _item: False

    def add_units(self, units: Iterable[Unit]) -> None:
        states = {unit.name: UnitState(unit) for unit in units}
        self.units.update(states)
        self._open.update(states)
        # A journal may be read before the segment to which its lines belong.
        for name in [name for name in self._orphans if name in states]:
            for worker, found in self._orphans.pop(name):
                self.add(worker, name, found)

    def watch(self) -> set[str]:
        """A set of units that will have the name of each unit of which something new is read."""
        self._watched.append(found := set(self.units))
        return found

    def publish(self, failed: dict[int, set[int]], retried: Callable[[int, int], bool]) -> None:
        """Apply a results table, which decides the states of its items.

        ``failed`` are the failed positions of every segment that the table covers. ``retried``
        tells whether a retry after the table names an item (entry, position).
        """
        self._published = failed
        self._retried = retried
        self._unjudged.update(self.units)
        for one in self._watched:
            one.update(self.units)

    def refresh_floors(self) -> None:
        """Recompute the states of all units after a retry was read."""
        self._unjudged.update(self.units)

    @property
    def open(self) -> set[str]:
        """Units with a pending item."""
        pending = set(filter(self.pending, self._unjudged))
        self._open |= pending
        self._open -= self._unjudged - pending
        self._unjudged.clear()
        return self._open

    def add(self, worker: str, name: str, found: Line | UnitRun) -> Unit | None:
        """Add what a journal says of a unit; return the unit, or None if it is not known yet."""
        state = self.units.get(name)
        if state is None:
            self._orphans.setdefault(name, []).append((worker, found))
            return None
        for one in self._watched:
            one.add(name)
        record = found.record
        if isinstance(found, UnitRun) and self._is_clean(state, found):
            state.release(record["generation"])
            # Without the record, which takes most of the memory of a long list.
            state.clean = (worker, found.start, found.end, found.sum)
            self.consecutive_failures[worker].note_done(record["at"])
            self.begun.discard(name)
            self._open.discard(name)
            self._unjudged.discard(name)
            return state.unit
        self.begun.add(name)
        if isinstance(found, Line):
            self._add_line(state, worker, found)
        else:
            state.release(record["generation"])
            for line in list(self._expand(worker, found.start, found.end)):
                self.add(worker, line.record["unit"].rpartition("/")[2], line)
        return state.unit

    @staticmethod
    def _is_clean(state: UnitState, found: UnitRun) -> bool:
        """Whether a unit run did every item of a unit of which no attempt is known."""
        if state.clean is not None or state.histories or found.start >= found.end:
            return False
        return bool(found.record["done"] == found.record["lines"] == state.unit.count)

    def _add_line(self, state: UnitState, worker: str, line: Line) -> None:
        record = line.record
        kind, generation = record["type"], record["generation"]
        if state.lacks(record):
            return
        if kind == "release":
            state.release(generation)
        elif kind == "death":
            if record["worker"] == worker and not record["explained"]:
                # Its own executor died; the death of a worker is reported by another worker.
                self.consecutive_failures[worker].note_failure(state.unit.name, record, died=True)
            if generation not in state.deaths:
                told = Death(**{name: record[name] for name in Death.fields})
                state.deaths = {**state.deaths, generation: told}
                self.deaths += 1
        else:
            self._add_attempt(state, worker, line)

    def _add_attempt(self, state: UnitState, worker: str, line: Line) -> None:
        self.open_up(state)
        record = line.record
        state.histories = state.histories or {}
        history = state.histories.get(record["item"])
        if history is None:
            history = state.histories[record["item"]] = History(self._steps(state.unit))
        ref = Ref(record["generation"], worker, line.start, line.end)
        if record["type"] == "done":
            self.consecutive_failures[worker].note_done(record["at"])
            history.done_lines += 1
            history.done = ref if history.done is None else min(history.done, ref)
        else:
            permanent, short = record["type"] == "permanent", record.get(self._short) is True
            history.note_failure(ref, short=short and not permanent, permanent=permanent)
            if not permanent and not (short and len(history.short) <= history.steps):
                self.consecutive_failures[worker].note_failure(state.unit.name, record, died=False)
        self._unjudged.add(state.unit.name)

    def open_up(self, state: UnitState) -> None:
        """Keep a unit item by item from now on: its unit run was not clean, or not the only one."""
        if state.clean is None:
            return
        worker, start, end, _ = state.clean
        lines = list(self._expand(worker, start, end))  # before any change, because it may fail
        state.clean = None
        self._unjudged.add(state.unit.name)
        for line in lines:  # each counts for the unit that it names
            self.add(worker, line.record["unit"].rpartition("/")[2], line)

    def item_state(self, state: UnitState, item: int) -> ItemState:
        """State of one item by rule R8."""
        if state.clean is not None:
            return ItemState.DONE
        failed = self._published.get(entry := state.unit.entry)
        if failed is not None and item not in failed:
            return ItemState.DONE
        if failed is not None and not self._retried(entry, item):
            return ItemState.FAILED
        if (history := state.histories.get(item)) is None:
            return ItemState.PENDING
        return history.state(floor=self.floor(entry, item), max_attempts=self.max_attempts)

    def touched(self, state: UnitState) -> Collection[int]:
        """The items of a unit whose state a line or a table decides; all others are pending."""
        if state.clean is not None or state.unit.entry in self._published:
            return state.unit.items
        return state.histories

    def growth(self, state: UnitState, item: int) -> int:
        """How often the needs of an item grew because it ran out (rule R18)."""
        history = state.histories.get(item)
        return 0 if history is None else history.growth(self.floor(state.unit.entry, item))

    def growths(self, unit: str) -> set[int]:
        """How often the needs of the pending items of a unit grew."""
        if not self._short:
            return {0}
        state = self.units[unit]
        return {self.growth(state, item) for item in self.pending(unit)}

    def floor(self, entry: int, item: int) -> int:
        return self._floors.get((entry, item), 0)

    def pending(self, unit: str) -> list[int]:
        """The pending items of a unit, in order."""
        state = self.units[unit]
        if state.clean is not None:
            return []
        return [i for i in state.unit.items if self.item_state(state, i) is ItemState.PENDING]

    def running_order(self, unit: str) -> list[int]:
        """The pending items of a unit; suspects run last, so that they cannot stop the others."""
        suspects = self.suspects(unit)
        return sorted(self.pending(unit), key=lambda item: len(suspects.get(item, ())))

    def suspects(self, unit: str) -> dict[int, list[Death]]:
        """Deaths that count against an item, without those that a retry lifted."""
        state = self.units[unit]
        found: dict[int, list[Death]] = {}
        for generation, death in sorted(state.deaths.items()):
            if generation > self.floor(state.unit.entry, death.item):
                found.setdefault(death.item, []).append(death)
        return {item: ones for item, deaths in found.items() if (ones := counting_of(deaths))}


def counting_of(deaths: list[Death]) -> list[Death]:
    """Of an item's deaths, those that it may have caused: silences of several nodes, or many."""
    silent = [one.host for one in deaths if one.explained == SILENT_NODE]
    causes = ("", SILENT_NODE) if len({*silent}) > 1 or len(silent) >= MAX_DEATHS else ("",)
    return [one for one in deaths if one.explained in causes]


MAX_DEATHS = 5


def is_killer(deaths: list[Death]) -> bool:
    """Whether these deaths, which count, show that the item kills its worker (rule R15)."""
    spread = len({death.host for death in deaths}) > 1 or sum(d.alone for d in deaths) >= 3
    return len(deaths) >= MAX_DEATHS and spread
