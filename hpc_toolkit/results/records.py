"""What happened in a run, as plain records; the readers of what is recorded beside the journals.

Times are epoch seconds; None: no file of the run records them. Each time is by the clock of the
process that wrote it, so times of different hosts differ by as much as their clocks do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_toolkit.queue.log import SEALED, StageLog
from hpc_toolkit.queue.presence import Presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.results.workers import ALIVE, end_of
from hpc_toolkit.rundir import files

DONE, DUPLICATE, FAILED, PERMANENT = "done", "duplicate", "failed", "permanent"
KILLED, LOST = "killed", "lost"
BY_WORKER, BY_FILE, UNKNOWN = "worker", "file", ""
"""Which clock gave the time of a claim: the worker's, the file server's (mtime), or none."""


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
    clock: str
    """What gave ``at``: :data:`BY_WORKER`, :data:`BY_FILE` or :data:`UNKNOWN`."""
    items: int
    group: Any
    """Group of the unit's first item; None without groups."""
    taken_from: str | None
    """The owner of the generation before; None for the first one, or if its claim is unreadable."""


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

    stage: str
    unit: str
    generation: int
    worker: str
    at: float
    seconds: float
    """Since the claim, loading included."""
    done: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A generation whose worker or executor died; a death is recorded when it is seen."""

    stage: str
    unit: str
    generation: int
    item: int
    """Number of the suspect in the run: the item that was first without a result."""
    worker: str
    """The worker that died, or whose executor died."""
    host: str
    by: str
    """The worker that recorded it; equal to ``worker`` if an executor died."""
    evidence: str
    """``lock``, ``lease``, ``slurm``, or ``executor killed by SIGKILL`` and the like."""
    explained: str
    """Why no item is suspected, such as ``drain`` or ``node failure``; "" otherwise."""
    at: float
    """When it was recorded, by the clock of ``by``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One entry of a stage's log."""

    stage: str
    number: int
    """From 1."""
    kind: str
    """``add``, ``seal``, ``retry`` or ``gather``."""
    at: float | None
    """Time of the entry's file, by the clock of the file server; None if it cannot be read."""
    items: int = 0
    """Items that were added or retried, or rows of the table; 0 for a seal."""
    units: int = 0
    failed: int = 0
    decision: dict[str, Any] | None = None
    """The coordinator's decision as the segment's header has it (runs/README.md), unchecked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to workers, or a notice about them."""

    name: str
    """Name of its file in ``control/``."""
    kind: str
    """``drain``, ``deaths`` (Slurm's reports) or ``sick`` (everything fails on a host)."""
    at: float | None
    """Time of the file, by the clock of the file server."""
    workers: tuple[str, ...]
    """The workers that it is about."""
    host: str = ""
    """The host of a ``sick`` notice."""
    reason: str = ""
    """Explanation for people; of ``deaths``, what Slurm reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """A worker started, or it is not alive."""

    at: float | None
    """Its start, or its last sign of life, by its own clock."""
    presence: Presence
    end: str = ""
    """How it ended (:mod:`hpc_toolkit.results.workers`); "" for its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job was submitted for the run."""

    name: str
    """Differs from the names of other submissions."""
    at: float | None
    job: dict[str, Any]


Work = Claim | Attempt | Release | Death
"""What workers write into their journals."""
Record = Work | LogEntry | Request | Life | Submission


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
