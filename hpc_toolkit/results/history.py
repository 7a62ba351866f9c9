"""What the workers of a run wrote into their journals, as one stream in the order of time.

The reader holds a part of each journal, so its memory does not grow with the number of attempts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.state import ItemState, Ref, UnitState
from hpc_toolkit.queue.units import claim_name
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results.workers import chunk_of, end_of_journal, lines_of
from hpc_toolkit.rundir.journal import Line, next_release

DONE, DUPLICATE, FAILED, PERMANENT = "done", "duplicate", "failed", "permanent"
KILLED, LOST = "killed", "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker claimed a unit."""

    stage: str
    unit: str
    generation: int
    """From 1; a higher generation took the unit over."""
    worker: str
    at: float | None
    """When the unit run began, else the time of the claim's file if that is its own."""
    is_exact: bool
    """Whether ``at`` is by the worker's clock, not by the file server's (mtime)."""


@dataclass(slots=True, kw_only=True)  # frozen, it would take three times as long to make
class Attempt:
    """One attempt at an item, which ended."""

    stage: str
    entry: int
    """Log entry of the item's segment."""
    position: int
    """Position of the item in its segment."""
    item: int
    """Number of the item in the run, from 0, in the given order: as ``explain --item`` takes it."""
    group: Any
    """Group of the unit's first item; None without groups."""
    unit: str
    generation: int
    number: int
    """1 for the first attempt of the item; deaths and results do not count, only failures do."""
    worker: str
    host: str
    """Host of the worker; "" if unknown."""
    begin: float | None
    """``end`` minus the seconds that the item took; None if unknown."""
    end: float | None
    """None: the worker died, and no file records when."""
    outcome: str
    """``done``; ``duplicate``: a result that does not count, because another one does; ``failed``;
    ``permanent``: failed and not retried; ``killed``: its executor died; ``lost``: its worker died.
    Which item an executor or worker was running is a guess: the first one without a result."""
    error: str
    """First line of the error, or what showed the death; "" for a result."""

    @property
    def seconds(self) -> float | None:
        return None if self.begin is None or self.end is None else self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A worker ended its run of a unit, and writes no more lines for this generation."""

    worker: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A generation whose worker or executor died; a death is recorded when it is seen."""

    worker: str
    """The worker that died, or whose executor died."""
    by: str
    """The worker that recorded it; equal to ``worker`` if an executor died."""
    evidence: str
    """``lock``, ``lease``, ``slurm``, or ``executor killed by SIGKILL`` and the like."""
    at: float
    """When it was recorded, by the clock of ``by``."""


Work = Claim | Attempt | Release | Death


_AHEAD = 1 << 16
"""Bytes read at once to find the end of a unit run: most are shorter."""
_ERROR_CHARS = 500
_TIME = itemgetter(0)
_ROUNDING_S = 0.002
"""Most by which rounding moves a claim's time: journals have milliseconds."""

_Run = tuple[str, int]
"""A unit with its stage, as journals name it, and a generation."""


@dataclass(slots=True)
class _Course:
    """How far one journal was read."""

    run: _Run = ("", 0)
    """The unit run of its last line."""
    unit: _Unit | None = None
    """The unit of its last line; None if that is not visible yet."""
    ended: float | None = None
    """When the last attempt in that unit run ended."""
    at: float = -math.inf
    """When its last line was written."""


class _Unit(NamedTuple):
    stage: StageView
    state: UnitState
    name: str
    group: Any

    @classmethod
    def of(cls, stage: StageView, state: UnitState) -> _Unit:
        unit = state.unit
        return cls(stage, state, unit.name, stage.log.segments[unit.entry].group_of(unit))

    def number(self, item: int, generation: int) -> int:
        """Number of an attempt of an item, from 1."""
        history = self.state.histories.get(item)
        return 1 if history is None else 1 + sum(one < generation for one in history.failures)

    def counts(self, worker: str, line: Line) -> bool:
        """Whether a result is the one that counts for its item (rules R11, R12)."""
        if self.state.clean is not None:
            owner, start, end, _ = self.state.clean
            return owner == worker and start <= line.start < end
        item, generation = line.record["item"], line.record["generation"]
        history = self.state.histories.get(item)
        if history is None or history.done != Ref(generation, worker, line.start, line.end):
            return False
        return self.stage.state.item_state(self.state, item) is ItemState.DONE

    def claim(self, generation: int, worker: str, at: float | None = None) -> Claim:
        """A claim whose unit run began ``at``; if that is unknown, use the time of its file."""
        return Claim(
            stage=self.stage.spec.name,
            unit=self.name,
            generation=generation,
            worker=worker,
            at=self._file_time(generation) if at is None else at,
            is_exact=at is not None,
        )

    def _file_time(self, generation: int) -> float | None:
        """Time of a claim's file; a claim that is one more name of an earlier claim has none."""
        path = self.stage.paths.claims / claim_name(self.name, generation)
        with suppress(OSError):
            info = path.lstat()
            return round(info.st_mtime, 3) if info.st_nlink == 1 else None
        return None


class History:
    """The records of a run as its files are when it is made; they can be read once.

    A journal that cannot be read is skipped, as in a status; the view's ``unreadable`` then has
    the error. Times are epoch seconds of the workers' clocks.
    """

    def __init__(self, view: RunView) -> None:
        self.view = view
        self._first: dict[tuple[str, int], int] = {}
        self._shown: set[_Run] = set()
        """Unit runs without a release whose claims were returned."""
        self._died: set[_Run] = set()
        view.poll_claims()
        self.presences: dict[str, Presence | None] = view.presences()
        view.poll()
        number = 0
        for stage in view.stages.values():
            for entry, segment in stage.log.segments.items():
                self._first[stage.spec.name, entry] = number
                number += segment.count if segment.numbers is None else 0

    def work(self) -> Iterator[Work]:
        """All records by the time when they were written, a claim when its unit run began.

        The lines of one journal keep their order, whatever its clock did.
        """
        streams = [self._journal(worker) for worker in sorted(self.view.readers)]
        for _, record in heapq.merge(*streams, self._open_claims(), key=_TIME):
            if not isinstance(record, Claim) or self._is_new(record):
                yield record

    def _is_new(self, claim: Claim) -> bool:
        """Whether a claim was not returned yet; its file and its journal both show it."""
        run = (f"{claim.stage}/{claim.unit}", claim.generation)
        if run in self._shown:
            return False
        state = self.view.stages[claim.stage].state.units[claim.unit]
        if claim.generation not in state.released:
            self._shown.add(run)
        return True

    def _unit(self, name: str) -> _Unit | None:
        """The unit that a journal line names; None if its segment is not visible yet."""
        stage = self.view.stages.get(name.partition("/")[0])
        state = stage.state.units.get(name.partition("/")[2]) if stage is not None else None
        return None if stage is None or state is None else _Unit.of(stage, state)

    def _journal(self, worker: str) -> Iterator[tuple[float, Work]]:
        course = _Course()
        for line in lines_of(self.view, worker):
            yield from self._line(worker, course, line)

    def _line(self, worker: str, course: _Course, line: Line) -> Iterator[tuple[float, Work]]:
        record, at = line.record, line.record["at"]
        if course.unit is None or course.run[0] != record["unit"]:
            course.unit = self._unit(record["unit"])
        if (unit := course.unit) is None or unit.state.lacks(record):
            return
        run = _run_of(record)
        takeover = record["type"] == "death" and record["worker"] != worker
        if takeover:  # the line precedes the unit run of the next generation
            run = (run[0], run[1] + 1)
        if run != course.run:
            course.run, course.ended = run, None
            yield self._begun(unit, worker, line, run, course.at)
        course.at = at
        if record["type"] == "death":
            yield from self._death(unit, record, worker, course.ended)
        elif record["type"] == "release":
            self._shown.discard(run)  # its claim cannot come again
            yield at, Release(worker=worker, at=at)
        else:
            yield at, self._attempt(unit, worker, line)
            course.ended = at

    def _begun(
        self, unit: _Unit, worker: str, line: Line, run: _Run, before: float
    ) -> tuple[float, Claim]:
        """The claim of the unit run that begins with ``line``; ``before``: time of the last one."""
        path, end = self.view.paths.journal(worker), end_of_journal(self.view, worker)
        release = next_release(path, line.start, end, min(chunk_of(self.view), _AHEAD))
        began = None
        if release is not None and run == _run_of(release):
            began = round(release["at"] - release["seconds"], 3)
            # It lies between the two lines, but all of these times are rounded.
            between = min(max(began, before), line.record["at"])
            began = between if abs(between - began) < _ROUNDING_S else began
        claim = unit.claim(run[1], worker, began)
        # The file server's clock must not change the order of this worker's lines.
        first = line.record["at"] - line.record.get("seconds", 0.0)
        return first if began is None else began, claim

    def _open_claims(self) -> Iterator[tuple[float, Claim]]:
        """Claims that no journal has released; those without a time come last."""
        found: list[tuple[float, Claim]] = []
        for stage in self.view.stages.values():
            for name, newest in stage.claims.newest.items():
                if (state := stage.state.units.get(name)) is None:
                    continue
                unit = _Unit.of(stage, state)
                for generation in range(1, newest + 1):
                    if generation in state.released:
                        continue
                    if owner := stage.claims.owner(name, generation):
                        claim = unit.claim(generation, owner)
                        found.append((math.inf if claim.at is None else claim.at, claim))
        yield from sorted(found, key=_TIME)

    def _attempt(self, unit: _Unit, worker: str, line: Line) -> Attempt:
        record = line.record
        outcome = record["type"]
        if outcome == DONE and not unit.counts(worker, line):
            outcome = DUPLICATE
        return self._ended(
            unit,
            record,
            worker=worker,
            begin=round(record["at"] - record["seconds"], 6),
            end=record["at"],
            outcome=outcome,
            error=first_line(record.get("error", "")),
        )

    def _ended(self, unit: _Unit, record: dict[str, Any], **facts: Any) -> Attempt:
        """An attempt at the item of a journal line."""
        generation, position = record["generation"], record["item"]
        stage, entry = unit.stage.spec.name, unit.state.unit.entry
        presence = self.presences.get(facts["worker"])
        return Attempt(
            stage=stage,
            entry=entry,
            position=position,
            item=self._first[stage, entry] + unit.stage.log.segments[entry].number(position),
            group=unit.group,
            unit=unit.name,
            generation=generation,
            number=unit.number(position, generation),
            host=presence.host if presence is not None else record.get("host", ""),
            **facts,
        )

    def _death(
        self, unit: _Unit, record: dict[str, Any], by: str, ended: float | None = None
    ) -> Iterator[tuple[float, Work]]:
        """A death and the attempt that it ended; several lines about one generation count once."""
        run = _run_of(record)
        if run in self._died:
            return
        self._died.add(run)
        at, died, evidence = record["at"], record["worker"], record["evidence"]
        own = died == by
        attempt = self._ended(
            unit,
            record,
            worker=died,
            begin=ended if own else self._last_end(died, run),
            end=at if own else None,
            outcome=KILLED if own else LOST,
            error=first_line(evidence if own else f"worker died: {evidence}"),
        )
        yield at, attempt
        yield at, Death(worker=died, by=by, evidence=evidence, at=at)

    def _last_end(self, worker: str, run: _Run) -> float | None:
        """When a dead worker's last attempt in a unit run ended, and so its next one began."""
        if worker not in self.view.readers:
            return None
        ends = [
            line.record["at"] for line in lines_of(self.view, worker) if _run_of(line.record) == run
        ]
        return max(ends, default=None)


def _run_of(record: dict[str, Any]) -> _Run:
    return record["unit"], record["generation"]


def first_line(text: object) -> str:
    lines = str(text).splitlines()
    return lines[0][:_ERROR_CHARS] if lines else ""
