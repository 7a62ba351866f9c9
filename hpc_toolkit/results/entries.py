"""What is recorded beside the journals: log entries, requests to workers, and their lives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.log import SEALED
from hpc_toolkit.results.records import Life, LogEntry, Request
from hpc_toolkit.results.workers import ALIVE, end_of
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView

_KINDS = {"items": "add", "retries": "retry", "results": "gather", SEALED: "seal"}


class EntryReader:
    """Reads the entries of the stages' logs and the files in ``control/``, each of them once."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._numbers: dict[str, int] = {}
        """The last log entry that was read, by stage."""
        self._requests: set[str] = set()

    def poll(self) -> Iterator[LogEntry | Request]:
        """What is new; a request that cannot be read yet is tried again by the next call."""
        for name, stage in self._view.stages.items():
            for number in range(self._numbers.get(name, 0) + 1, stage.log.length + 1):
                entry = _entry(stage.log, number)
                self._numbers[name] = number
                yield entry
        control = self._view.paths.control
        for name in sorted(files.list_names(control)):
            if name.endswith(".json") and name not in self._requests:
                record = _first_record(control / name)
                if record:
                    self._requests.add(name)
                    yield _request(control / name, record)


def lives(seen: Mapping[str, Presence | None], alive: set[str]) -> Iterator[Life]:
    """The starts of all workers whose presence was read, and the ends of those not alive."""
    for name, one in seen.items():
        if one is not None:  # else it cannot be read yet, or is damaged
            yield Life(at=one.started, presence=one)
            if (end := end_of(name, one, alive)) != ALIVE:
                yield Life(at=one.at, presence=one, end=end)


def _entry(log: StageLog, number: int) -> LogEntry:
    path = log.paths.entry(number)
    try:
        target, at = path.readlink().as_posix(), round(path.lstat().st_mtime, 3)
    except OSError:
        # Only the kind of a segment is known without the entry's link.
        target, at = "items/" if number in log.segments else "", None
    kind = _KINDS.get(target.partition("/")[0], "")
    facts: dict[str, Any] = {}
    if kind == "add":
        segment = log.segments[number]
        facts = {"items": segment.count, "units": len(segment.units), "decision": segment.decision}
    elif kind == "retry":
        floors = _first_record(log.paths.root / target).get("floors")
        facts = {"items": _length(floors)}
    elif kind == "gather":
        header = _first_record(log.paths.root / target)
        rows = header.get("rows")
        facts = {"items": rows if isinstance(rows, int) else 0}
        facts["failed"] = _length(header.get("failed"))
    return LogEntry(stage=log.paths.name, number=number, kind=kind, at=at, **facts)


def _first_record(path: Path) -> dict[str, Any]:
    """The JSON object of a file's first line; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            record = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _length(values: object) -> int:
    return len(values) if isinstance(values, list) else 0


def _request(path: Path, record: dict[str, Any]) -> Request:
    try:
        at = round(path.lstat().st_mtime, 3)
    except OSError:
        at = None
    workers = record.get("workers")
    reported = workers.values() if isinstance(workers, dict) else ()
    reasons = {str(one.get("explained", "")) for one in reported if isinstance(one, dict)}
    return Request(
        name=path.name,
        kind=str(record.get("request", "")),
        at=at,
        workers=tuple(map(str, workers)) if isinstance(workers, list | dict) else (),
        host=str(record.get("host", "")),
        reason=str(record.get("reason", "")) or ", ".join(sorted(filter(None, reasons))),
    )
