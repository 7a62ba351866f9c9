"""What happened in a run as one stream of JSON objects in the order of time."""

from __future__ import annotations

import heapq
import json
import math
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from hpc_toolkit.results import records
from hpc_toolkit.results.entries import RequestReader, read_entries
from hpc_toolkit.results.history import History
from hpc_toolkit.results.records import Attempt, Claim, Death, LogEntry, Release, Request
from hpc_toolkit.results.workers import ALIVE, end_of, living_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.results.history import Record
    from hpc_toolkit.system.clock import Clock

Event = dict[str, Any]
"""``at``: epoch seconds, None if no file records the time; ``event``: its kind; and more keys."""

_Timed = tuple[float, Event]
_REQUESTS = {"drain": "drain", "deaths": "notice", "sick": "sick"}
_OBSERVED = ("arm", "scores", "stderrs", "seconds", "failed")


class EventReader:
    """Reads the events of a run; each :meth:`poll` goes on where the last one ended."""

    def __init__(
        self,
        view: RunView,
        clock: Clock,
        jobs: Callable[[], Iterable[Event]] = lambda: (),
        policy: str | None = None,
    ) -> None:
        """``jobs`` returns an event for each job that was submitted so far.

        ``policy``: the policy of a campaign whose log does not record it.
        """
        self.history = History(view)
        self.alive = False
        """Whether a worker seemed alive at the last poll."""
        self._clock = clock
        self._jobs = jobs
        self._policy: object = policy
        self._entries: dict[str, int] = {}
        self._requests = RequestReader(view.paths)
        self._known: set[tuple[str, str]] = set()
        """Job files, and states of workers, whose events were returned."""

    def poll(self) -> Iterator[_Timed]:
        """What is new, each with the time by which it is sorted: infinite if there is none."""
        self.history.refresh()
        others = [
            *self._log_events(),
            *(request_event(one) for one in self._requests.poll()),
            *self._worker_events(),
            *self._job_events(),
        ]
        timed = [(math.inf if one["at"] is None else one["at"], one) for one in others]
        recorded = ((at, record_event(one)) for at, one in self.history.timed_records())
        both = (sorted(timed, key=itemgetter(0)), recorded)
        yield from ((at, one) for at, one in heapq.merge(*both, key=itemgetter(0)) if one)

    def _job_events(self) -> Iterator[Event]:
        for job in self._jobs():
            if self._is_new("job", str(job["file"])):
                yield {key: value for key, value in job.items() if key != "file"}

    def _is_new(self, kind: str, name: str) -> bool:
        key = (kind, name)
        new = key not in self._known
        self._known.add(key)
        return new

    def _worker_events(self) -> Iterator[Event]:
        found = self.history.presences
        alive = living_workers(self.history.view, self._clock, found)
        self.alive = bool(alive)
        for name, presence in found.items():
            if presence is None:  # it cannot be read yet, or is damaged
                continue
            if self._is_new("start", name):
                yield _start(presence)
            end = end_of(name, presence, alive)
            if end != ALIVE and self._is_new(end, name):
                yield _end(presence, end, self.history.seen(name))

    def _log_events(self) -> Iterator[Event]:
        for entry in read_entries(self.history.view, self._entries):
            self._entries[entry.stage] = entry.number
            if isinstance(entry.decision, dict):
                yield from self._decision(entry, entry.decision)
            event = {"at": entry.at, "event": entry.kind, "stage": entry.stage}
            if entry.kind == "add":
                event |= {"items": entry.items, "units": entry.units}
            elif entry.kind == "retry":
                event |= {"items": entry.items}
            elif entry.kind == "gather":
                event |= {"rows": entry.items, "failed": entry.failed}
            yield event

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


def _start(presence: Presence) -> Event:
    return {
        "at": presence.started,
        "event": "worker-start",
        "worker": presence.worker,
        "host": presence.host,
        "rank": presence.rank,
        "job": presence.job,
        "requeues": presence.restart,
        "cpus": presence.place.get("cpus"),
        "gpus": presence.place.get("gpus"),
    }


def _end(presence: Presence, end: str, seen: float | None) -> Event:
    return {
        "at": seen,
        "event": "worker-end",
        "worker": presence.worker,
        "host": presence.host,
        "end": end,
        "note": presence.note,
        "done": presence.done,
        "failed": presence.failed,
    }


def request_event(request: Request) -> Event:
    """The event of a request to workers or a notice about them."""
    return {
        "at": request.at,
        "event": _REQUESTS.get(request.kind, "notice"),
        "workers": list(request.workers),
        "host": request.host,
        "reason": request.reason,
    }


def record_event(record: Record) -> Event | None:
    """The event of a record; None for an attempt that ended by a death, which has its own event."""
    if isinstance(record, Attempt):
        return _attempt(record)
    where = {"stage": record.stage, "unit": record.unit, "generation": record.generation}
    if isinstance(record, Claim):
        return {
            "at": record.at,
            "event": "claim",
            **where,
            "worker": record.worker,
            "items": record.items,
            "group": record.group,
            "taken_from": record.taken_from,
            "clock": record.clock,
        }
    if isinstance(record, Release):
        return {
            "at": record.at,
            "event": "release",
            **where,
            "worker": record.worker,
            "seconds": record.seconds,
            "done": record.done,
            "failed": record.failed,
        }
    assert isinstance(record, Death)
    return {
        "at": record.at,
        "event": "death",
        **where,
        "item": record.item,
        "worker": record.worker,
        "host": record.host,
        "by": record.by,
        "evidence": record.evidence,
        "explained": record.explained,
    }


def _attempt(attempt: Attempt) -> Event | None:
    if attempt.outcome in (records.KILLED, records.LOST):
        return None
    result = attempt.outcome in (records.DONE, records.DUPLICATE)
    return {
        "at": attempt.end,
        "event": "done" if result else "failed",
        "stage": attempt.stage,
        "unit": attempt.unit,
        "generation": attempt.generation,
        "item": attempt.item,
        "attempt": attempt.number,
        "outcome": attempt.outcome,
        "worker": attempt.worker,
        "host": attempt.host,
        "begin": attempt.begin,
        "error": attempt.error,
    }
