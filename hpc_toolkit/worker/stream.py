"""What an executor answers to one request, read by its worker (R4)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpc_toolkit.rundir.journal import seal_line
from hpc_toolkit.worker import attempts as wire

if TYPE_CHECKING:
    from hpc_toolkit.worker.hosthealth import FailureCount
    from hpc_toolkit.worker.membership import Drain
    from hpc_toolkit.worker.unitlines import UnitLines

_STATES = {
    wire.KEPT: "done",
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
    rest: list[bytes] = field(default_factory=list)
    """Parts of a message that is not complete."""
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
    grown: bool = False
    """Whether lines in ``ready`` name bytes of the value file that are not synced."""
    failed: bool | None = None
    """Whether the last item failed; None: no item ended."""
    _heads: dict[bytes, bytes] = field(init=False)
    """How a message of each kind begins, up to the number of its item."""
    _items: list[bytes] = field(init=False)
    """The numbers of the items, each with the comma behind it; after the last, no number."""

    def __post_init__(self) -> None:
        self._items = [*f"{self.positions},".strip("[").replace("]", "").encode().split(), b"?"]
        heads = {kind: f'{{"type":"{state}",{self.where}' for kind, state in _STATES.items()}
        self._heads = {kind: kind + head.encode() for kind, head in heads.items()}

    def take(self, data: bytes) -> None:
        """Take in what was read from the executor's pipe."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join([*self.rest, lines[0]])
            self.rest = []
        self.rest.append(rest)  # joined only once, because a result may be large
        done, items, index = self._heads[wire.DONE], self._items, self.index
        size = len(done)
        for line in lines:
            # Almost all messages are results, and the worker's time for each counts.
            if line.startswith(done) and line.startswith(items[index], size) and not self.deaf:
                index += 1
                self.ready.append(seal_line(line[1:]))
                continue
            self._note_done(index)
            if (kind := line[:1]) not in _STATES:
                self._take_note(kind, line[1:].decode(errors="replace"))
            elif not self.deaf:
                self._take_other(kind, line)
            if self.wrong:
                return
            index = self.index
        self._note_done(index)

    def _note_done(self, index: int) -> None:
        """Count the items before ``index`` as done."""
        if index > self.index:
            self.lines.tally.done += index - self.index
            self.index, self.failed = index, False
            self.failures.note_done()

    def _take_other(self, kind: bytes, line: bytes) -> None:
        head = self._heads[kind]
        # Any process that inherits the pipe can write to it.
        if not (line.startswith(head) and line.startswith(self._items[self.index], len(head))):
            self.wrong = "it sent a result that was not requested"
            return
        if kind == wire.INTERRUPTED and self.drain.requested:
            self.wrong = "aborted"
            return
        self.index += 1
        self.ready.append(seal_line(line[1:]))
        if kind == wire.KEPT:
            self.grown, self.failed = True, False
            self.lines.tally.done += 1
            self.failures.note_done()
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
        elif kind == wire.UNWRITABLE:
            raise OSError(int(text), os.strerror(int(text)))
        else:
            self.wrong = "it sent a message that is not known"
