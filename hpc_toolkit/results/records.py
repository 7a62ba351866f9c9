"""What happened in a run, as plain records.

Times are epoch seconds; None: no file of the run records them. Each time is by the clock of the
process that wrote it, so times of different hosts differ by as much as their clocks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence

DONE, DUPLICATE, FAILED, PERMANENT = "done", "duplicate", "failed", "permanent"
KILLED, LOST = "killed", "lost"
BY_WORKER, BY_FILE, UNKNOWN = "worker", "file", ""
"""Which clock gave the time of a claim: the worker's, the file server's (mtime), or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A worker claimed a unit."""

    stage: str
    unit: str
    """Name of the unit in its stage."""
    generation: int
    """From 1; a higher generation took the unit over."""
    worker: str
    at: float | None
    """When the unit run began, else the time of the claim's file if that is its own."""
    clock: str
    """What gave ``at``: :data:`BY_WORKER`, :data:`BY_FILE` or :data:`UNKNOWN`."""
    items: int
    """Number of items of the unit."""
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
    """Units of an added segment."""
    failed: int = 0
    """Failed rows of the table."""
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
