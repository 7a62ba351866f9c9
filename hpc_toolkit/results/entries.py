"""The entries of the stages' logs, and the requests to workers, with the times of their files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.log import SEALED
from hpc_toolkit.results.records import LogEntry, Request
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hpc_toolkit.queue.log import StageLog
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.layout import RunPaths

_KINDS = {"items": "add", "retries": "retry", "results": "gather", SEALED: "seal"}


def read_entries(view: RunView, after: dict[str, int] | None = None) -> list[LogEntry]:
    """The log entries that a view has read, by stage and number.

    ``after``: the last number of each stage that the caller knows; only later entries are read.
    """
    return [
        _entry(stage.log, number)
        for name, stage in view.stages.items()
        for number in range((after or {}).get(name, 0) + 1, stage.log.length + 1)
    ]


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


class RequestReader:
    """Reads every file in ``control/`` once."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: set[str] = set()

    def poll(self) -> Iterator[Request]:
        """What is new; a file that cannot be read yet is tried again by the next call."""
        for name in sorted(files.list_names(self._paths.control)):
            if name.endswith(".json") and name not in self._read:
                path = self._paths.control / name
                record = _first_record(path)
                if record:
                    self._read.add(name)
                    yield _request(path, record)


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
