"""What an executor answers to one request, read by its worker (R4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.rundir.journal import seal_line
from hpc_toolkit.worker import attempts as wire

if TYPE_CHECKING:
    from hpc_toolkit.worker.hosthealth import FailureCount
    from hpc_toolkit.worker.membership import Drain
    from hpc_toolkit.worker.unitlines import UnitLines

_STATES = {
    wire.DONE: "done",
    wire.FAILED: "failed",
    wire.INTERRUPTED: "failed",
    wire.PERMANENT: "permanent",
}


@dataclass(slots=True, kw_only=True)
class Stream:
    """The messages about one request: what they say, and the journal lines that they bring."""

    lines: UnitLines
    """Where results are written."""
    where: str
    """Fields that name the unit run in each line."""
    positions: list[int]
    """The items of the request."""
    failures: FailureCount
    drain: Drain
    weight: int
    """What one failure adds to the failures in a row."""
    since: float
    """Monotonic time at which the running item began, as far as the worker knows."""
    rest: bytes = b""
    index: int = 0
    """Items reported so far, done or failed."""
    loading: bool = False
    can_prefetch: bool | None = None
    """Whether the workload has ``prefetch``; None: not reported."""
    end: str | None = None
    broken: str | None = None
    wrong: str = ""
    """Why the executor must be ended: a message that does not answer the request, or "aborted"."""
    deaf: bool = False
    """Whether results are ignored, because the item's time was up before they came."""
    ready: list[bytes] = field(default_factory=list)
    """Journal lines that were received and not yet written."""
    failed: bool | None = None
    """Whether the last item failed; None: no item ended."""

    def take(self, data: bytes) -> None:
        """Take in what was read from the executor's pipe."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            kind, body = line[:1], line[1:]
            if self.wrong:
                return
            if kind in _STATES:
                self._take_attempt(kind, body)
            else:
                self._take_note(kind, body.decode(errors="replace"))

    def _take_attempt(self, kind: bytes, body: bytes) -> None:
        if self.deaf:
            return
        left = self.positions[self.index :]
        head = f'{{"type":"{_STATES[kind]}",{self.where}{left[0]},' if left else ""
        # Any process that inherits the pipe can write to it.
        if not (left and body.startswith(head.encode())):
            self.wrong = "it sent a result that was not requested"
            return
        if kind == wire.INTERRUPTED and self.drain.requested:
            self.wrong = "aborted"
            return
        self.index += 1
        self.ready.append(seal_line(body))
        if kind == wire.DONE:
            self.lines.tally.done += 1
            self.failures.note_done()
            self.failed = False
            return
        self.lines.tally.failed += 1
        if kind != wire.PERMANENT:  # the process is not the cause of those
            self.failures.note_failure(self.weight)
            self.failed = True

    def _take_note(self, kind: bytes, text: str) -> None:
        if kind in (wire.LOADING, wire.LOADED):
            self.loading = kind == wire.LOADING
        elif kind == wire.END:
            self.end = text
        elif kind == wire.PREFETCHES:
            self.can_prefetch = text == "yes"
        elif kind == wire.BROKEN:
            self.broken = text
        else:
            self.wrong = "it sent a message that is not known"
