"""What the workers of a run did over time: their attempts as rows, and sums in bounded memory.

Every second of a worker's life is counted once, in one of :data:`STATES`. A timeline has a lane for
each worker, or for the workers of hosts if there are many, and intervals of equal length.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.presence import FINISHED, Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results import history as records
from hpc_toolkit.results.history import Attempt, Claim, Death, History, Release, Work
from hpc_toolkit.results.sums import Durations, group_name
from hpc_toolkit.results.workers import (
    ALIVE,
    DIED,
    DRAINED,
    end_of,
    living_workers,
)
from hpc_toolkit.rundir.layout import without_places
from hpc_toolkit.system.clock import Clock

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row

WORK, LOAD, WAIT, TAIL, FAILED, DUPLICATE = "work", "load", "wait", "tail", "failed", "duplicate"
RUNNING = "running"
STATES = {
    WORK: "in items whose result counts",
    LOAD: "in unit runs outside of items: loading code and models, and starting executors. To save"
    " some, group items by model (--group-by), or give claims more items (--items-per-claim)",
    WAIT: "without a unit before the last one: starting up, and waiting for something to claim."
    " Jobs started slowly, or there was too little to claim: in a campaign, raise 'pending'",
    TAIL: "from the end of a worker's last unit run to its exit: nothing was left to claim. To save"
    " some, put the longest items first, make claims smaller, or use fewer workers",
    FAILED: "in attempts that failed, were killed, or were lost with their worker;"
    " 'hpctk try --item N' runs one item here",
    DUPLICATE: "in items whose result another worker gave as well: a worker seemed dead, for"
    " example because its filesystem hung",
    RUNNING: "in the items that living workers run now",
}
"""The states of a worker, what its seconds in them were spent on, and how to save some."""

_OUTCOMES = {records.DONE: WORK, records.DUPLICATE: DUPLICATE}
_MOST_GROUPS = 2_000
OTHERS = "(other groups)"
MOST_LANES = 200
_MOST_CELLS, _FINEST, _COARSEST = 12_000, 240, 48
_TEXT_CHARS = 160

EXECUTOR, REQUEUED = "executor died", "requeued"
"""Kinds of marks on a timeline, beside the ends of workers that died or were drained."""


@dataclass(slots=True)
class Lane:
    """One row of a timeline."""

    host: str
    """The host of its workers, or the first and the last of several."""
    workers: int = 0
    spent: dict[str, dict[int, float]] = field(default_factory=dict)
    """Seconds by state and interval."""
    lives: dict[int, float] = field(default_factory=dict)
    """Seconds that workers lived, by interval."""
    marks: dict[tuple[int, str], Mark] = field(default_factory=dict)
    """Marks by interval and kind."""


@dataclass(slots=True)
class Mark:
    """Events of one kind in one interval of a lane."""

    at: float
    """The first of them, in epoch seconds."""
    text: str
    """What it was."""
    count: int = 1


class Timeline:
    """Intervals of equal length, and lanes that are filled with seconds."""

    def __init__(self, begin: float, end: float, lanes: list[Lane]) -> None:
        self.begin = begin
        self.lanes = lanes
        self.other = Lane("(unknown host)")
        """For workers whose files cannot be read."""
        fine = _MOST_CELLS // max(1, len(lanes))
        self.intervals = min(_FINEST, max(_COARSEST, fine))
        self.width_s = max((end - begin) / self.intervals, 1e-5)

    @property
    def end(self) -> float:
        return self.begin + self.intervals * self.width_s

    @property
    def drawn(self) -> list[Lane]:
        """The lanes that workers have."""
        return [*self.lanes, *([self.other] if self.other.workers else [])]

    def interval(self, at: float) -> int:
        return min(max(int((at - self.begin) / self.width_s), 0), self.intervals - 1)

    def mark(self, lane: Lane, kind: str, at: float, text: str) -> None:
        key = (self.interval(at), kind)
        if key in lane.marks:
            lane.marks[key].count += 1
        else:
            lane.marks[key] = Mark(at, text[:_TEXT_CHARS])

    def fill(self, cells: dict[int, float], begin: float, end: float) -> None:
        """Add each second to its interval."""
        first, last = self.interval(begin), self.interval(end)
        for number in range(first, last + 1):
            low = begin if number == first else self.begin + number * self.width_s
            high = end if number == last else self.begin + (number + 1) * self.width_s
            cells[number] = cells.get(number, 0.0) + max(high - low, 0.0)


@dataclass(slots=True, kw_only=True)
class Activity:
    """The sums over a run."""

    timeline: Timeline
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    """Worker-seconds by state; together they are the lives of all workers."""
    lives_s: float = 0.0
    """Seconds from the start of each worker to its last sign of life, added up."""
    workers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Number of attempts by outcome."""
    groups: dict[tuple[str, str], Durations] = field(default_factory=dict)
    """How long the attempts with a result took, by stage and group; groups beyond the first 2,000
    are counted together."""


@dataclass(slots=True)
class _Worker:
    """How far a worker's life was counted."""

    lane: Lane
    presence: Presence | None
    began: float
    at: float
    """Until when; what comes next begins here."""
    in_run: bool = False
    has_run: bool = False
    """Whether it has had a unit."""
    died: Death | None = None


def read_activity(history: History, clock: Clock) -> Activity:
    """Sum up all records; nothing may have been read from ``history``.

    Times are those of the workers' clocks. Seconds that a clock counts twice, because it was set
    back, are counted once.
    """
    seen, done = history.presences, history.view.throughput
    lanes, timeline = lay_out(seen, min(done.since, clock.wall()), done.until)
    reader = _Reader(Activity(timeline=timeline), seen, lanes)
    for record in history.work():
        reader.take(record)
    reader.finish(living_workers(history.view, clock, seen))
    return reader.found


class _Reader:
    def __init__(
        self, found: Activity, presences: dict[str, Presence | None], lanes: dict[str, Lane]
    ) -> None:
        self.found = found
        self._presences = presences
        self._lanes = lanes
        self._workers: dict[str, _Worker] = {}

    def take(self, record: Work) -> None:
        if isinstance(record, Attempt):
            self._attempt(record)
        elif isinstance(record, Claim):
            self._claim(record)
        elif isinstance(record, Release):
            worker = self._worker(record.worker, record.at)
            if worker.in_run:
                self._spend(worker, LOAD, record.at)
            worker.in_run = False
        else:
            self._death(record)

    def finish(self, alive: set[str]) -> None:
        """Count what comes after each worker's last record."""
        for name, presence in self._presences.items():
            if presence is not None and presence.started:
                self._worker(name, presence.started)
        for name, worker in self._workers.items():
            self._close(name, worker, end_of(name, worker.presence, alive))

    def _worker(self, name: str, at: float) -> _Worker:
        worker = self._workers.get(name)
        if worker is None:
            presence = self._presences.get(name)
            began = presence.started if presence is not None and presence.started else at
            lane = self._lanes.get(name) or self.found.timeline.other
            self._workers[name] = worker = _Worker(lane, presence, began, began)
            self.found.workers += 1
            if presence is not None and presence.restart:
                text = f"{name} started, requeue {presence.restart} of job {presence.job}"
                self._mark(worker, REQUEUED, began, text)
        return worker

    def _spend(self, worker: _Worker, state: str, until: float) -> None:
        """Count the seconds up to ``until`` in a state."""
        begin, worker.at = worker.at, max(worker.at, until)
        if worker.at <= begin:
            return
        self.found.seconds[state] += worker.at - begin
        cells = worker.lane.spent.setdefault(state, {})
        self.found.timeline.fill(cells, begin, worker.at)

    def _claim(self, claim: Claim) -> None:
        if claim.at is None and claim.worker not in self._workers:
            return
        worker = self._worker(claim.worker, claim.at or 0.0)
        if not worker.in_run and claim.at is not None:
            # The file server's clock may be ahead of the worker's.
            seen = worker.presence.at if worker.presence is not None else worker.at
            if claim.is_exact or claim.at <= seen:
                self._spend(worker, WAIT, claim.at)
        worker.in_run = worker.has_run = True

    def _attempt(self, attempt: Attempt) -> None:
        self.found.outcomes[attempt.outcome] += 1
        if attempt.end is None:
            return  # its worker died; what is left of its life is counted at its end
        begin = attempt.end if attempt.begin is None else attempt.begin
        worker = self._worker(attempt.worker, begin)
        if attempt.begin is not None:
            self._spend(worker, LOAD if worker.in_run else WAIT, begin)
        self._spend(worker, _OUTCOMES.get(attempt.outcome, FAILED), attempt.end)
        if attempt.begin is not None and attempt.outcome in _OUTCOMES:
            groups, name = self.found.groups, group_name(attempt.group)
            if len(groups) >= _MOST_GROUPS and (attempt.stage, name) not in groups:
                name = OTHERS
            groups.setdefault((attempt.stage, name), Durations()).add(attempt.end - begin)

    def _death(self, death: Death) -> None:
        self.found.outcomes["deaths"] += 1
        worker = self._worker(death.worker, death.at)
        if death.by == death.worker:
            self._mark(worker, EXECUTOR, death.at, f"{death.worker}: {death.evidence}")
        elif worker.died is None:
            worker.died = death

    def _close(self, name: str, worker: _Worker, end: str) -> None:
        seen = worker.presence.at if worker.presence is not None else worker.at
        if worker.in_run:
            state = RUNNING if end == ALIVE else FAILED
        else:
            state = TAIL if worker.has_run and end in (FINISHED, DRAINED) else WAIT
        self._spend(worker, state, seen)
        self.found.lives_s += worker.at - worker.began
        worker.lane.workers += 1
        self.found.timeline.fill(worker.lane.lives, worker.began, worker.at)
        if worker.died is not None or end == DIED:
            why = f": {worker.died.evidence}" if worker.died is not None else ""
            self._mark(worker, DIED, worker.at, f"{name} died{why}")
        elif end == DRAINED and worker.presence is not None:
            self._mark(worker, DRAINED, worker.at, f"{name} exited early: {worker.presence.note}")

    def _mark(self, worker: _Worker, kind: str, at: float, text: str) -> None:
        self.found.timeline.mark(worker.lane, kind, at, text)


def lay_out(
    presences: dict[str, Presence | None], since: float, until: float
) -> tuple[dict[str, Lane], Timeline]:
    """The lane of each worker, and the empty timeline: of their lives, at least to ``until``.

    ``since`` is when it begins if no life is known.
    A lane has the workers of one rank that followed each other. If these are too many, a lane has
    all workers of a host, or of several hosts.
    """
    lives = [one for one in presences.values() if one is not None and one.started]
    lives.sort(key=lambda one: (one.host, one.started, one.rank, one.worker))
    begin = min((one.started for one in lives), default=since)
    end = max(begin, until, *(one.at for one in lives))
    lanes, of = _by_rank(lives)
    if len(lanes) > MOST_LANES:
        lanes, of = _by_host(lives)
    return of, Timeline(begin, end, lanes)


def _by_rank(lives: Iterable[Presence]) -> tuple[list[Lane], dict[str, Lane]]:
    lanes: dict[str, list[tuple[Lane, list[float]]]] = defaultdict(list)
    of: dict[str, Lane] = {}
    for one in lives:
        free = (found for found in lanes[one.host] if found[1][0] <= one.started)
        lane, ends = next(free, (None, [0.0]))
        if lane is None:
            lane = Lane(one.host)
            lanes[one.host].append((lane, ends))
        of[one.worker], ends[0] = lane, max(one.at, one.started)
    return [lane for some in lanes.values() for lane, _ in some], of


def _by_host(lives: list[Presence]) -> tuple[list[Lane], dict[str, Lane]]:
    hosts = list(dict.fromkeys(one.host for one in lives))
    size = -(-len(hosts) // MOST_LANES)
    lanes: list[Lane] = []
    lane_of: dict[str, Lane] = {}
    for first in range(0, len(hosts), size):
        some = hosts[first : first + size]
        lane = Lane(some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}")
        lanes.append(lane)
        lane_of |= dict.fromkeys(some, lane)
    return lanes, {one.worker: lane_of[one.host] for one in lives}


@dataclass
class Trace:
    """The attempts of a run as rows, which are read again each time that they are used.

    They are in the order in which attempts ended; ``stage``: only those of a stage.
    """

    view: RunView
    stage: str | None = None
    count: int = 0
    """Number of rows, once all were read."""
    own: ClassVar = (
        *("number", "stage", "unit", "generation", "attempt", "outcome"),
        *("begin", "end", "seconds", "worker", "host", "job", "error"),
    )
    """Columns that describe an attempt, in this order, after the columns of its item."""

    def __iter__(self) -> Iterator[Row]:
        history, self.count = History(self.view), 0
        stages = self.view.stages

        # Workers run their units side by side.
        @lru_cache(maxsize=2 * len(self.view.readers))
        def lines_of(stage: str, entry: int, unit: str) -> list[bytes]:
            """The JSON of a unit's items; empty if its segment is damaged."""
            with suppress(RunError, OSError):
                return stages[stage].log.segments[entry].lines(stages[stage].unit(unit))
            return []

        for record in history.work():
            if isinstance(record, Attempt) and self.stage in (None, record.stage):
                self.count += 1
                presence = history.presences.get(record.worker)
                seconds = record.seconds
                lines = lines_of(record.stage, record.entry, record.unit)
                place = record.position - stages[record.stage].unit(record.unit).first
                yield {
                    "item": without_places(json.loads(lines[place])) if lines else {},
                    "number": record.item,
                    "stage": record.stage,
                    "unit": record.unit,
                    "generation": record.generation,
                    "attempt": record.number,
                    "outcome": record.outcome,
                    "begin": record.begin,
                    "end": record.end,
                    "seconds": seconds if seconds is None else round(seconds, 6),
                    "worker": record.worker,
                    "host": record.host,
                    "job": presence.job if presence is not None else None,
                    "error": record.error,
                }
