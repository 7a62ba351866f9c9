"""Requests to an executor, its answers, and the journal lines of a unit run (R4, R5, R15)."""

from __future__ import annotations

import os
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from hpc_toolkit.queue.control import OUT_OF_MEMORY
from hpc_toolkit.queue.presence import host_part
from hpc_toolkit.queue.state import is_killer
from hpc_toolkit.rundir.journal import encode_line, release_line, seal_line
from hpc_toolkit.system.quantities import format_duration
from hpc_toolkit.system.record import Record, fresh
from hpc_toolkit.worker import attempts as wire

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.state import Death
    from hpc_toolkit.rundir.journal import JournalWriter, ValueFile
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.worker.hosthealth import FailureCount
    from hpc_toolkit.worker.membership import Drain


class Outcome(Enum):
    """How a unit run ended."""

    COMPLETE = auto()
    STOPPED = auto()
    """The worker was asked to stop, or time is up; the rest of the unit was released."""
    OVERTAKEN = auto()
    """Another worker took the next generation; nothing more was written."""
    HELD = auto()
    """This host may be the cause of the failures; the rest of the unit was released."""
    DIED = auto()
    """The executor died; the rest of the unit was released."""


class Tally(Record, frozen=False):
    """Counts of one unit run."""

    done: int = 0
    failed: int = 0
    permanent: int = 0
    deaths: int = 0


class UnitLines:
    """Writes the lines of one unit run into its worker's journal."""

    def __init__(self, journal: JournalWriter, clock: Clock, assignment: Assignment) -> None:
        self._journal = journal
        self.clock = clock
        self._assignment = assignment
        self._began = clock.monotonic()
        self._start = journal.size
        self._written: list[bytes] = []
        self.tally = Tally()

    def append(self, data: bytes) -> None:
        self._journal.append(data)
        self._written.append(data)

    def move(self, journal: JournalWriter) -> None:
        """Continue in the journal of another name of this worker, and count anew."""
        self._journal, self._start, self._written = journal, journal.size, []
        self.tally = Tally()

    def owner_died(self, order: list[int]) -> None:
        """Record that the previous generation's owner died with the items ``order`` still to run.

        The line precedes the unit run, whose ``sum`` does not cover it.
        """
        assert self._assignment.died is not None
        owner, verdict = self._assignment.died
        # The file server may never have shown the file that names the owner's host.
        host = verdict.host or host_part(owner) or owner
        facts = {"evidence": verdict.evidence, "explained": verdict.explained}
        died = self._assignment.generation - 1
        self._journal.append(self._death_line(order, died, worker=owner, host=host, **facts))
        self._start = self._journal.size

    def executor_died(self, left: list[int], how: str, *, worker: str, host: str) -> None:
        """Record that this worker's executor died with the items ``left`` still to run."""
        self.tally.deaths += 1
        facts = {"worker": worker, "host": host, "evidence": f"executor {how}", "explained": ""}
        self.append(self._death_line(left, self._assignment.generation, **facts))

    def _death_line(self, left: list[int], generation: int, **facts: str) -> bytes:
        suspects = self._assignment.stage.state.suspects(self._assignment.unit.name)
        return encode_line(
            {
                "type": "death",
                "unit": self._assignment.name,
                "generation": generation,
                "item": left[0],
                # Of several killers in one unit, none is ever the only pending item.
                "alone": len(left) == 1 or all(item in suspects for item in left),
                "at": round(self.clock.wall(), 3),
                **facts,
            }
        )

    def killer(self, item: int, deaths: int, last: Death) -> None:
        """Fail an item permanently because it killed its worker or executor too often."""
        self.tally.permanent += 1
        error = f"killed its worker {deaths} times, last: {last.evidence} on {last.host}"
        self._failure("permanent", item, error, 0.0)

    def timed_out(self, item: int, limit_s: float, *, permanent: bool) -> None:
        self.tally.failed += 1
        error = f"took longer than the timeout of {format_duration(limit_s)}"
        self._failure("permanent" if permanent else "failed", item, error, limit_s, timeout=True)

    def out_of_memory(self, item: int, error: str, seconds: float) -> None:
        """Record that an executor or a worker died because an item used its memory up."""
        self.tally.failed += 1
        self._failure("failed", item, error, seconds, oom=True)

    def _failure(self, kind: str, item: int, error: str, seconds: float, **why: bool) -> None:
        record = {
            "type": kind,
            "unit": self._assignment.name,
            "generation": self._assignment.generation,
            "item": item,
            "at": round(self.clock.wall(), 3),
            "seconds": round(seconds, 6),
            "error": error,
            **why,
        }
        self.append(encode_line(record))

    def release(self) -> None:
        failed = self.tally.failed + self.tally.permanent
        facts = {
            "unit": self._assignment.name,
            "generation": self._assignment.generation,
            "lines": self.tally.done + failed + self.tally.deaths,
            "done": self.tally.done,
            "failed": failed,
            # From the start of the unit run, loading included.
            "seconds": round(self.clock.monotonic() - self._began, 6),
            "at": round(self.clock.wall(), 3),
        }
        self._journal.append(release_line(self._start, b"".join(self._written), **facts))


_READ = 1 << 18
_STATES = {
    wire.KEPT: "done",
    wire.DONE: "done",
    wire.FAILED: "failed",
    wire.INTERRUPTED: "failed",
    wire.PERMANENT: "permanent",
}


class Stream(Record, frozen=False, stateful=True, kw_only=True):
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
    rest: list[bytes] = fresh(factory=list)
    """Parts of a message that is not complete."""
    index: int = 0
    """Items reported so far, done or failed."""
    loading: bool = False
    end: str | None = None
    broken: str | None = None
    wrong: str = ""
    """Why the executor must be ended: a message that does not answer the request, or "aborted"."""
    deaf: bool = False
    """Whether results are ignored, because the item's time was up before they came."""
    ready: list[bytes] = fresh(factory=list)
    """Journal lines that were received and not yet written."""
    grown: list[bytes] = fresh(factory=list)
    """Lines in ``ready`` that name bytes of the value file that are not synced."""
    lost: bool = False
    """Whether a sync of the value file failed: a later one that succeeds proves nothing of it."""
    unwritable: int = 0
    """Number of the error for which the executor could not write the value file; 0: none."""
    failed: bool | None = None
    """Whether the last item failed; None: no item ended."""
    limit_s: float | None = None
    """Time limit of an item."""
    limits: dict[int, float] = fresh(factory=dict)
    """Those of items that got more time."""
    growing: dict[int, str] = fresh(factory=dict)
    """Items of ``positions`` that get more when they run out of it: ``on`` of the retry."""

    def __post_init__(self) -> None:
        # The numbers of the items, each with the comma behind it; after the last, no number.
        self._items = [*f"{self.positions},".strip("[").replace("]", "").encode().split(), b"?"]
        heads = {kind: f'{{"type":"{state}",{self.where}' for kind, state in _STATES.items()}
        # How a message of each kind begins, up to the number of its item.
        self._heads = {kind: kind + head.encode() for kind, head in heads.items()}

    def receive(self, fd: int) -> bool:
        """Take in the executor's new messages; return whether there were any."""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return False
        if data:
            self.take(data)
            self.since = self.lines.clock.monotonic()
        return bool(data)

    def write(self, journal: JournalWriter, values: ValueFile, *, overtaken: bool) -> None:
        """Journal the results received, unless another worker has the unit.

        Raises OSError: the results that are not in the journal are in its ``unsynced``.
        """
        ready, self.ready = self.ready, []
        grown, self.grown = self.grown, []
        if self.lost:  # no line may name bytes that may be lost: those items run again
            ready, grown = [line for line in ready if line not in grown], []
        if ready and not overtaken:
            if grown:
                try:
                    values.sync()
                except OSError:
                    self.lost = True
                    journal.unsynced += [line for line in ready if line not in grown]
                    raise
            self.lines.append(b"".join(ready))
        if self.unwritable:
            number, self.unwritable = self.unwritable, 0
            raise OSError(number, os.strerror(number))

    @property
    def running_limit_s(self) -> float | None:
        """Time limit of the running item."""
        running = self.positions[self.index] if self.index < len(self.positions) else -1
        return self.limits.get(running, self.limit_s)

    def note_failure(self, item: int, why: str = "") -> None:
        """Count a failure in a row, unless the item gets more of what it ran out of."""
        self.failures.note_failure(0 if why and self.growing.get(item) == why else self.weight)

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
        # A quote inside of a text has a backslash before it, so this is the field.
        if kind == wire.KEPT or b',"exception":[' in line:
            self.grown.append(self.ready[-1])
        if kind == wire.KEPT:
            self.failed = False
            self.lines.tally.done += 1
            self.failures.note_done()
            return
        self.lines.tally.failed += 1
        if kind != wire.PERMANENT:  # the process is not the cause of those
            short = [why for why in ("oom", "gpu_oom") if b', "%s": true,' % why.encode() in line]
            self.note_failure(self.positions[self.index - 1], *short)
            self.failed = True

    def _take_note(self, kind: bytes, text: str) -> None:
        if kind in (wire.LOADING, wire.LOADED):
            self.loading = kind == wire.LOADING
        elif kind == wire.END:
            self.end = text
        elif kind == wire.BROKEN:
            self.broken = text
        elif kind == wire.UNWRITABLE:
            self.unwritable = int(text)
        else:
            self.wrong = "it sent a message that is not known"


def order_for(
    assignment: Assignment, lines: UnitLines, poll: Callable[[], None], holds: Callable[[int], bool]
) -> list[int]:
    """Journal what deaths say about items; return the pending ones in the order of the unit run.

    ``poll`` reads the worker's own journal; ``holds``: whether it has what a growth needs.
    """
    state, unit = assignment.stage.state, assignment.unit.name
    order = state.running_order(unit)
    died = assignment.died[1].evidence if assignment.died is not None else ""
    if order and ran_out(assignment, died):
        lines.out_of_memory(order.pop(0), f"worker died: {died}", 0.0)
    elif order and assignment.died is not None:
        lines.owner_died(order)
        poll()
        order = state.running_order(unit)
    suspects = state.suspects(unit)
    for item in [i for i in order if i in suspects and is_killer(suspects[i])]:
        lines.killer(item, len(suspects[item]), suspects[item][-1])
        order.remove(item)
    if assignment.stage.spec.retry:
        order = [i for i in order if holds(state.growth(state.units[unit], i))]
    return order


def request_for(
    assignment: Assignment, left: list[int], values: Path, drain: Drain
) -> dict[str, Any]:
    """What the executor needs to know to run the items ``left``, besides the items."""
    stage, durations = assignment.stage, assignment.stage.durations
    expected_s = durations.seconds_of(stage.group_of(assignment.unit)) if durations.known else 0.0
    return {
        "stage": stage.paths.name,
        "unit": assignment.unit.name,
        "generation": assignment.generation,
        "positions": left,
        "values": str(values),
        "deadline": drain.deadline,
        "no_retry": stage.spec.final,
        "expected_s": expected_s,
    }


def fragile_of(assignment: Assignment, left: list[int]) -> set[int]:
    """Items that a process does not run after a failure, which it may have caused.

    A CUDA error or a leak would use up all attempts of an item in one process.
    """
    state, entry = assignment.stage.state, assignment.unit.entry
    if state.max_attempts == 1:
        return set(left)
    known = state.units[assignment.unit.name].histories
    return {i for i in left if i in known and known[i].last_failure(state.floor(entry, i))}


def ran_out(assignment: Assignment, how: str) -> bool:
    """Whether a death shows that an item ran out of memory, and that it gets more (rule R18)."""
    retry = assignment.stage.specs.retry(assignment.unit)
    return retry is not None and retry.on == "oom" and how.endswith(OUT_OF_MEMORY)


def limits_of(assignment: Assignment, left: list[int]) -> dict[str, Any]:
    """What a stream knows of the items that get more when they run out of it (rule R18)."""
    stage, retry = assignment.stage, assignment.stage.specs.retry(assignment.unit)
    found: dict[str, Any] = {"limit_s": stage.spec.timeout_s}
    if retry is not None:
        unit = stage.state.units[assignment.unit.name]
        growths = {item: stage.state.growth(unit, item) for item in left}
        found["growing"] = {i: retry.on for i, number in growths.items() if number < retry.steps}
        if retry.on == "timeout":
            found["limits"] = {i: retry.amount(number) for i, number in growths.items()}
    return found
