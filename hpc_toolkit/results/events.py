"""What happened in a run: as one stream of JSON objects in the order of time, its latest part, and
the trace, a row for each attempt at an item.

Times are those of the records (:mod:`hpc_toolkit.results.records`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results import records
from hpc_toolkit.results.history import History
from hpc_toolkit.results.records import (
    Attempt,
    Claim,
    Death,
    EntryReader,
    Life,
    LogEntry,
    Record,
    Release,
    Request,
    Submission,
    lives,
)
from hpc_toolkit.results.workers import DIED
from hpc_toolkit.rundir.layout import without_places
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row


Event = dict[str, Any]
"""``at``: epoch seconds, None if no file records the time; ``event``: its kind; and more keys."""

_REQUESTS = {"drain": "drain", "deaths": "notice", "sick": "sick"}
_REQUESTED = {"drain": "asked to exit", "deaths": "reported dead by Slurm"}
_KINDS = {Claim: "claim", Release: "release", Death: "death", Life: "worker-end"}
_FIELDS = {
    "claim": "at stage unit generation worker items group taken_from clock",
    "attempt": "at=end stage unit generation item attempt=number outcome worker host begin error",
    "release": "at stage unit generation worker seconds done failed",
    "death": "at stage unit generation item worker host by evidence explained",
    "worker-start": (
        "at worker=presence.worker host=presence.host rank=presence.rank job=presence.job "
        "requeues=presence.restart"
    ),
    "worker-end": (
        "at worker=presence.worker host=presence.host end note=presence.note "
        "done=presence.done failed=presence.failed"
    ),
    "add": "at stage items units",
    "seal": "at stage",
    "retry": "at stage items",
    "gather": "at stage rows=items failed",
    "request": "at workers host reason",
}
"""The keys of each kind of event, with the field of the record where its name is another one."""
_PAIRS = {kind: [word.partition("=") for word in words.split()] for kind, words in _FIELDS.items()}
_ROWS = {
    kind: ([key for key, _, _ in pairs[1:]], attrgetter(*(field or key for key, _, field in pairs)))
    for kind, pairs in _PAIRS.items()
}
_OBSERVED = ("arm", "scores", "stderrs", "seconds", "failed")
_TOGETHER_S = 60.0
"""Equal events that follow each other within this time share a line."""


class EventReader:
    """Reads the events of a run; each :meth:`poll` goes on where the last one ended."""

    def __init__(self, history: History, policy: str | None = None) -> None:
        """``policy``: the policy of a campaign whose log does not record it."""
        self._history = history
        self._policy: object = policy

    def poll(self) -> Iterator[tuple[float, Event]]:
        """What is new, each with the time by which it is sorted: infinite if there is none."""
        self._history.refresh()
        for at, record in self._history.records():
            for event in self._events(record):
                yield at, event

    def _events(self, record: Record) -> Iterator[Event]:
        if isinstance(record, LogEntry):
            if isinstance(record.decision, dict):
                yield from self._decision(record, record.decision)
            yield _event(record.kind, record, record.kind if record.kind in _ROWS else "seal")
        elif isinstance(record, Attempt):
            # An attempt that ended by a death has no event beside that of the death.
            if record.outcome not in (records.KILLED, records.LOST):
                is_result = record.outcome in (records.DONE, records.DUPLICATE)
                yield _event("done" if is_result else "failed", record, "attempt")
        elif isinstance(record, Request):
            event = _event(_REQUESTS.get(record.kind, "notice"), record, "request")
            yield event | {"workers": list(record.workers)}
        elif isinstance(record, Submission):
            yield {"at": record.at, "event": "job", **record.job}
        elif isinstance(record, Life) and not record.end:
            place = {key: record.presence.place.get(key) for key in ("cpus", "gpus")}
            yield _event("worker-start", record) | place
        else:
            yield _event(_KINDS[type(record)], record)

    def _decision(self, entry: LogEntry, decision: dict[str, Any]) -> Iterator[Event]:
        """The tells and the ask of a segment; they are passed on as the log has them."""
        search = decision.get("search")
        if isinstance(search, dict):
            self._policy = search.get("policy", self._policy)
        tells = decision.get("tells")
        common = {"stage": entry.stage, "decision": decision.get("number")}
        for tell in tells if isinstance(tells, list) else ():
            told = {key: tell.get(key) for key in _OBSERVED} if isinstance(tell, dict) else {}
            yield {"at": entry.at, "event": "tell", **common, **told}
        yield {
            "at": entry.at,
            "event": "ask",
            **common,
            "policy": self._policy,
            "why": decision.get("why"),
            "arms": decision.get("arms"),
            "tasks": decision.get("tasks"),
        }


def event_line(event: Event) -> str:
    """One line of strict JSON in printable ASCII: any text may be in a run.

    So no escape sequence, and no character that changes the direction of text, reaches a terminal.
    """
    try:
        return json.dumps(event, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(event)) + "\n"


def _finite(value: Any) -> Any:
    """A value without the numbers that JSON does not have: a damaged file may contain them."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _event(kind: str, record: Record, row: str = "") -> Event:
    keys, values_of = _ROWS[row or kind]
    at, *values = values_of(record)
    return {"at": at, "event": kind, **dict(zip(keys, values, strict=True))}


@dataclass(frozen=True, slots=True)
class Recent:
    """Something that happened, or several alike."""

    at: float
    """Epoch seconds, of the last one."""
    what: str
    count: int = 1
    where: str = ""
    """Worker or host of the last one."""
    is_bad: bool = False


class RecentEvents:
    """Returns the latest events of a run; log entries and requests are read once."""

    def __init__(self, view: RunView) -> None:
        self._entries = EntryReader(view)
        self._kept: list[Recent] = []

    def read(
        self,
        seen: Mapping[str, Presence | None],
        alive: set[str],
        failures: Sequence[dict[str, Any]],
        most: int = 10,
    ) -> list[Recent]:
        """The latest events, newest first; ``failures`` are those of a status."""
        for record in self._entries.poll():
            self._kept += _recent_entry(record) if isinstance(record, LogEntry) else [_told(record)]
        self._kept = sorted(self._kept, key=attrgetter("at"))[-most:]
        # The ends are found anew each time: a worker that seemed dead may show life again.
        known = (one for one in lives(seen, alive) if one.at or one.end)
        found = [*self._kept, *map(_recent_life, known), *_failed(failures)]
        return _joined(sorted(found, key=attrgetter("at"), reverse=True), most)


def _recent_entry(entry: LogEntry) -> Iterator[Recent]:
    at, items = entry.at or 0.0, counted(entry.items or 0, "item")
    decision = entry.decision if isinstance(entry.decision, dict) else None
    if decision is not None:
        arms = decision.get("arms")
        count = len(arms) if isinstance(arms, list) else 0
        yield Recent(at, f"search requested {counted(count, 'arm')} ({items})")
    elif entry.kind == "add":
        yield Recent(at, f"{items} added to stage {entry.stage}")
    elif entry.kind == "retry":
        yield Recent(at, f"retry of {items} of {entry.stage}")
    elif entry.kind == "gather":
        yield Recent(at, f"results of {entry.stage} gathered")


def _told(one: Request) -> Recent:
    if one.kind == "sick":
        return Recent(one.at or 0.0, f"host {one.host}: {one.reason}", is_bad=True)
    what = _REQUESTED.get(one.kind, one.kind)
    reason = f" ({one.reason})" if one.reason else ""
    return Recent(one.at or 0.0, f"{counted(len(one.workers), 'worker')} {what}{reason}")


def _recent_life(one: Life) -> Recent:
    presence, at = one.presence, one.at or 0.0
    if not one.end:
        return Recent(at, "worker started", where=presence.host)
    if one.end == DIED:
        return Recent(at, "worker died", where=presence.worker, is_bad=True)
    why = f": {presence.note}" if presence.note else ""
    return Recent(at, f"worker ended{why}", where=presence.host)


def _failed(failures: Sequence[dict[str, Any]]) -> Iterator[Recent]:
    for one in failures:
        if one["last"] is not None:
            yield Recent(one["last"], f"item {one['item']} failed: {one['message']}", is_bad=True)


def _joined(events: list[Recent], most: int) -> list[Recent]:
    """The newest events, those that are alike and near each other as one."""
    found: list[Recent] = []
    begun: dict[str, tuple[int, float]] = {}
    for one in events:
        place, at = begun.get(one.what, (-1, 0.0))
        if place >= 0 and at - one.at <= _TOGETHER_S:
            before = found[place]
            found[place] = Recent(before.at, one.what, before.count + 1, before.where, one.is_bad)
        elif len(found) == most:
            break
        else:
            place = len(found)
            found.append(one)
        begun[one.what] = (place, one.at)
    return found


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
        history.refresh()
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
