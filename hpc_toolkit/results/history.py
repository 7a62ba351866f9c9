"""The history of a run: everything that its files record, as one stream in the order of time.

Everything is read from the run's files, without locks, without writes and without calls to Slurm.
The reader holds a part of each journal, so its memory does not grow with the number of attempts.
"""

from __future__ import annotations

import heapq
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from hpc_toolkit.queue.claims import claim_name
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.state import ItemState, Ref, UnitState
from hpc_toolkit.queue.view import RunView, StageView
from hpc_toolkit.results import records
from hpc_toolkit.results.records import (
    Attempt,
    Claim,
    Death,
    EntryReader,
    Life,
    Record,
    Release,
    Submission,
    Work,
    lives,
)
from hpc_toolkit.results.workers import (
    chunk_of,
    end_of_journal,
    last_line_at,
    lines_of,
    living_workers,
)
from hpc_toolkit.rundir.journal import Line, next_release
from hpc_toolkit.system.clock import Clock, SystemClock

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

    offset: int = 0
    run: _Run = ("", 0)
    """The unit run of its last line."""
    unit: _Unit | None = None
    """The unit of its last line; None if that is not visible yet."""
    ended: float | None = None
    """When the last attempt in that unit run ended."""
    at: float = -math.inf
    """When its last line was written."""


class _Unit(NamedTuple):
    """A unit of a stage."""

    stage: StageView
    state: UnitState
    name: str
    group: Any

    @classmethod
    def of(cls, stage: StageView, state: UnitState) -> _Unit:
        unit = state.unit
        return cls(stage, state, unit.name, stage.log.segments[unit.entry].group_of(unit))

    @property
    def place(self) -> dict[str, Any]:
        """The names of the stage and of the unit, which all records have."""
        return {"stage": self.stage.spec.name, "unit": self.name}

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
        clock = records.BY_WORKER
        if at is None:
            at = self._file_time(generation)
            clock = records.UNKNOWN if at is None else records.BY_FILE
        return Claim(
            **self.place,
            generation=generation,
            worker=worker,
            at=at,
            clock=clock,
            items=self.state.unit.count,
            group=self.group,
            taken_from=self.owner(generation - 1) if generation > 1 else None,
        )

    def owner(self, generation: int) -> str | None:
        """The worker that a claim names; None if the claim cannot be read."""
        path = self.stage.paths.claims / claim_name(self.name, generation)
        with suppress(OSError):
            return os.readlink(path)
        return None

    def _file_time(self, generation: int) -> float | None:
        """Time of a claim's file; a claim that is one more name of an earlier claim has none."""
        path = self.stage.paths.claims / claim_name(self.name, generation)
        with suppress(OSError):
            info = path.lstat()
            return round(info.st_mtime, 3) if info.st_nlink == 1 else None
        return None


class History:
    """Reads the records of a run; each call goes on where the last one ended.

    Call :meth:`refresh` before. A journal that cannot be read is skipped, as in a status; the
    view's ``unreadable`` then has the error. ``jobs`` returns all jobs submitted so far.
    """

    def __init__(
        self,
        view: RunView,
        clock: Clock | None = None,
        jobs: Callable[[], Iterable[Submission]] = lambda: (),
    ) -> None:
        self.view = view
        self.presences: dict[str, Presence | None] = {}
        """The workers' presences when they were last read."""
        self.alive: set[str] = set()
        """The workers that seemed alive when :meth:`records` was last called."""
        self._clock = clock or SystemClock()
        self._jobs = jobs
        self._entries = EntryReader(view)
        self._known: set[tuple[str, str]] = set()
        """States of workers, and jobs, whose records were returned."""
        self._courses: dict[str, _Course] = {}
        self._first: dict[tuple[str, int], int] = {}
        self._claimed: dict[str, dict[str, int]] = {name: {} for name in view.stages}
        self._shown: set[_Run] = set()
        """Unit runs without a release whose claims were returned."""
        self._died: set[_Run] = set()

    def refresh(self) -> None:
        """Read what is new in the run. Costs as much as a status."""
        self.view.poll_claims()
        self.presences = self.view.presences()
        self.view.poll()
        number = 0
        for stage in self.view.stages.values():
            for entry, segment in stage.log.segments.items():
                self._first[stage.spec.name, entry] = number
                number += segment.count if segment.numbers is None else 0

    def records(self) -> Iterator[tuple[float, Record]]:
        """All that the last :meth:`refresh` read and that was not returned before.

        Each record comes with the time by which it is sorted, infinite if none is known: when it
        was recorded, for a claim when its unit run began. The lines of one journal keep their
        order, whatever its clock did. A result is ``done`` or ``duplicate`` by what is known now; a
        later line may change that.
        """
        self.alive = living_workers(self.view, self._clock, self.presences)
        jobs = (one for one in self._jobs() if self._is_first("job", one.name))
        found = (*self._entries.poll(), *self._new_lives(), *jobs)
        beside = [(math.inf if one.at is None else one.at, one) for one in found]
        return heapq.merge(sorted(beside, key=_TIME), self._timed_work(), key=_TIME)

    def work(self) -> Iterator[Work]:
        """As :meth:`records`, only what workers wrote into their journals."""
        return (record for _, record in self._timed_work())

    def _timed_work(self) -> Iterator[tuple[float, Work]]:
        streams = [self._journal(worker) for worker in sorted(self.view.readers)]
        for at, record in heapq.merge(*streams, self._open_claims(), key=_TIME):
            if not isinstance(record, Claim) or self._is_new(record):
                yield at, record

    def _new_lives(self) -> Iterator[Life]:
        for one in lives(self.presences, self.alive):
            name = one.presence.worker
            if self._is_first(one.end or "start", name):
                yield replace(one, at=self.seen(name)) if one.end else one

    def _is_first(self, kind: str, name: str) -> bool:
        is_first = (kind, name) not in self._known
        self._known.add((kind, name))
        return is_first

    def _is_new(self, claim: Claim) -> bool:
        """Whether a claim was not returned yet; its file and its journal both show it."""
        run = (f"{claim.stage}/{claim.unit}", claim.generation)
        if run in self._shown:
            return False
        state = self.view.stages[claim.stage].state.units[claim.unit]
        if claim.generation not in state.released:
            self._shown.add(run)
        return True

    def item_number(self, stage: str, entry: int, position: int) -> int:
        """Number of an item in the run, as ``hpctk explain --item`` takes it."""
        segment = self.view.stages[stage].log.segments[entry]
        return self._first[stage, entry] + segment.number(position)

    def seen(self, worker: str) -> float | None:
        """A worker's last sign of life, by its own clock: its last heartbeat or journal line."""
        presence = self.presences.get(worker)
        times = [None if presence is None else presence.at, last_line_at(self.view, worker)]
        return max((at for at in times if at is not None), default=None)

    def _unit(self, name: str) -> _Unit | None:
        """The unit that a journal line names; None if its segment is not visible yet."""
        stage = self.view.stages.get(name.partition("/")[0])
        state = stage.state.units.get(name.partition("/")[2]) if stage is not None else None
        return None if stage is None or state is None else _Unit.of(stage, state)

    def _journal(self, worker: str) -> Iterator[tuple[float, Work]]:
        course = self._courses.setdefault(worker, _Course())
        for line in lines_of(self.view, worker, course.offset):
            course.offset = line.end
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
            facts = {key: record[key] for key in ("generation", "seconds", "done", "failed")}
            yield at, Release(**unit.place, worker=worker, at=at, **facts)
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
        """New claims that no journal has released; those without a time come last."""
        found: list[tuple[float, Claim]] = []
        for stage in self.view.stages.values():
            claimed = self._claimed[stage.spec.name]
            for name, newest in stage.claims.newest.items():
                state, before = stage.state.units.get(name), claimed.get(name, 0)
                if state is None or newest == before:
                    continue
                claimed[name] = newest
                for generation in range(before + 1, newest + 1):
                    unit = _Unit.of(stage, state)
                    owner = None if generation in state.released else unit.owner(generation)
                    if owner is not None:
                        claim = unit.claim(generation, owner)
                        found.append((math.inf if claim.at is None else claim.at, claim))
        yield from sorted(found, key=_TIME)

    def _attempt(self, unit: _Unit, worker: str, line: Line) -> Attempt:
        record = line.record
        outcome = record["type"]
        if outcome == records.DONE and not unit.counts(worker, line):
            outcome = records.DUPLICATE
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
        generation = record["generation"]
        presence = self.presences.get(facts["worker"])
        return Attempt(
            **unit.place,
            entry=unit.state.unit.entry,
            position=record["item"],
            item=self._number(unit, record),
            group=unit.group,
            generation=generation,
            number=unit.number(record["item"], generation),
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
            outcome=records.KILLED if own else records.LOST,
            error=first_line(evidence if own else f"worker died: {evidence}"),
        )
        yield at, attempt
        keys = ("generation", "worker", "host", "evidence", "explained", "at")
        facts = {key: record[key] for key in keys}
        yield at, Death(**unit.place, item=self._number(unit, record), by=by, **facts)

    def _number(self, unit: _Unit, record: dict[str, Any]) -> int:
        return self.item_number(unit.stage.spec.name, unit.state.unit.entry, record["item"])

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
    """First line of an error, shortened."""
    lines = str(text).splitlines()
    return lines[0][:_ERROR_CHARS] if lines else ""
