"""The latest events of a run, and the trace: a row for each attempt at an item."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpc_toolkit.errors import RunError
from hpc_toolkit.queue.log import StageLog
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.history import Attempt, History
from hpc_toolkit.results.workers import ALIVE, DIED, end_of
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import without_places
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row


_REQUESTED = {"drain": "asked to exit", "deaths": "reported dead by Slurm"}
_TOGETHER_S = 60.0
"""Equal events that follow each other within this time share a line."""


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
        self._view = view
        self._read: dict[str, int] = {}
        """The last log entry that was read, by stage."""
        self._requests: set[str] = set()
        self._kept: list[Recent] = []

    def read(
        self,
        seen: Mapping[str, Presence | None],
        alive: set[str],
        failures: Sequence[dict[str, Any]],
        most: int = 10,
    ) -> list[Recent]:
        """The latest events, newest first; ``failures`` are those of a status."""
        self._kept = sorted([*self._kept, *self._new()], key=attrgetter("at"))[-most:]
        # The ends are found anew each time: a worker that seemed dead may show life again.
        found = [*self._kept, *_lives(seen, alive), *_failed(failures)]
        return _joined(sorted(found, key=attrgetter("at"), reverse=True), most)

    def _new(self) -> Iterator[Recent]:
        """New log entries and requests; a request that cannot be read yet is tried again."""
        for name, stage in self._view.stages.items():
            for number in range(self._read.get(name, 0) + 1, stage.log.length + 1):
                self._read[name] = number
                yield from _entry(stage.log, number)
        control = self._view.paths.control
        for name in sorted(files.list_names(control)):
            if not name.endswith(".json") or name in self._requests:
                continue
            if record := _first_record(control / name):
                self._requests.add(name)
                yield _request(control / name, record)


def _entry(log: StageLog, number: int) -> Iterator[Recent]:
    """The event of one entry of a log; none for a seal, or an entry that cannot be read."""
    path, stage = log.paths.entry(number), log.paths.name
    with suppress(OSError):
        target, at = path.readlink().as_posix(), path.lstat().st_mtime
        kind = target.partition("/")[0]
        if kind == "items":
            segment = log.segments[number]
            items, decision = counted(segment.count, "item"), segment.decision
            if isinstance(decision, dict):
                arms = counted(_length(decision.get("arms")), "arm")
                yield Recent(at, f"search requested {arms} ({items})")
            else:
                yield Recent(at, f"{items} added to stage {stage}")
        elif kind == "retries":
            floors = _length(_first_record(log.paths.root / target).get("floors"))
            yield Recent(at, f"retry of {counted(floors, 'item')} of {stage}")
        elif kind == "results":
            yield Recent(at, f"results of {stage} gathered")


def _first_record(path: Path) -> dict[str, Any]:
    """The JSON object of a file's first line; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _length(values: object) -> int:
    return len(values) if isinstance(values, list | dict) else 0


def _request(path: Path, record: dict[str, Any]) -> Recent:
    """A request to workers, or a notice about them."""
    at, kind = 0.0, str(record.get("request", ""))
    with suppress(OSError):
        at = path.lstat().st_mtime
    workers, why = record.get("workers"), str(record.get("reason", ""))
    if kind == "sick":
        return Recent(at, f"host {record.get('host', '')}: {why}", is_bad=True)
    reported = workers.values() if isinstance(workers, dict) else ()
    reasons = {str(one.get("explained", "")) for one in reported if isinstance(one, dict)}
    why = why or ", ".join(sorted(filter(None, reasons)))
    what = _REQUESTED.get(kind, kind)
    return Recent(at, f"{counted(_length(workers), 'worker')} {what}{why and f' ({why})'}")


def _lives(seen: Mapping[str, Presence | None], alive: set[str]) -> Iterator[Recent]:
    """The starts of all workers whose presence was read, and the ends of those not alive."""
    for name, one in seen.items():
        if one is None:  # it cannot be read yet, or is damaged
            continue
        if one.started:
            yield Recent(one.started, "worker started", where=one.host)
        if (end := end_of(name, one, alive)) == DIED:
            yield Recent(one.at, "worker died", where=name, is_bad=True)
        elif end != ALIVE:
            yield Recent(one.at, f"worker ended{one.note and f': {one.note}'}", where=one.host)


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
