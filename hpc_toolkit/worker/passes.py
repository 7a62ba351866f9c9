"""Unit runs: send a unit's items to the executor and journal what happens (R4, R5, R15).

The code calls a unit run a pass.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.queue.items import UnitReader
from hpc_toolkit.queue.state import AGAIN_WEIGHT, DEATH_WEIGHT, is_killer
from hpc_toolkit.rundir.journal import seal_line
from hpc_toolkit.system.processes import readable
from hpc_toolkit.worker import attempts as wire
from hpc_toolkit.worker.executor import Executor
from hpc_toolkit.worker.passlines import PassLines, Tally

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.journal import JournalWriter
    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.system.clock import Clock

_SYNC_S = 0.5
_LOOK_S = 1.0
_STOPPING_S = 0.1
_BATCH_S = 0.002
_READ = 1 << 18


class Outcome(Enum):
    """How a unit run ended."""

    COMPLETE = auto()
    STOPPED = auto()
    """The worker was told to stop, or time is up; the rest of the unit was given back."""
    OVERTAKEN = auto()
    """Another worker took the next generation; nothing more was written."""
    HELD = auto()
    """This host may be the cause of the failures; the rest of the unit was given back."""
    DIED = auto()
    """The executor died; the rest of the unit was given back."""


@dataclass(slots=True)
class PassControl:
    """The worker's orders to a running unit run; its ``tick`` changes them."""

    stop: bool = False
    """Start no further item."""
    abort: bool = False
    """End the running item without counting an attempt."""
    hold: bool = False
    """Start no further item until other hosts have tried the items that failed here."""
    streak: int = 0
    """Weight of the failures since the last result (:mod:`hpc_toolkit.queue.state`)."""
    streak_limit: int = wire.STREAK
    """Weight at which ``on_streak`` is called."""
    deadline: float | None = None
    """Monotonic time after which no item should run."""


@dataclass(slots=True)
class _Stream:
    """The executor's messages for one request."""

    lines: PassLines
    """Where results are written."""
    rest: bytes = b""
    weight: int = 1
    """What one failure adds to the streak."""
    index: int = 0
    """Items reported so far, done or failed."""
    since: float = 0.0
    """Monotonic time at which the running item began, as far as the worker can tell."""
    loading: bool = False
    end: str | None = None
    broken: str | None = None
    ready: list[bytes] = field(default_factory=list)
    """Journal lines that were received and not yet written."""


class PassRunner:
    """Executes unit runs with one executor, which it keeps warm and replaces when it dies."""

    def __init__(
        self,
        *,
        worker: str,
        host: str,
        stages: dict[str, StageSpec],
        view: RunView,
        journal: JournalWriter,
        log_path: Path,
        clock: Clock,
        wake_fd: int,
        tick: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._host = host
        self._stages = stages
        self._view = view
        self._journal = journal
        self._log_path = log_path
        self._clock = clock
        self._wake_fd = wake_fd
        self._tick = tick
        self._executor: Executor | None = None
        self._units = UnitReader()
        self._synced_at = clock.monotonic()
        self._looked_at = clock.monotonic()
        self._overtaken = False
        self.control = PassControl()
        self.on_streak: Callable[[], object] = lambda: None
        """Called when many items failed in a row, and before an item's last attempt."""
        self.ahead: Callable[[Assignment], str | None] = lambda _assignment: None
        """Returns the group to prefetch while a unit runs, for workloads that can prefetch."""
        self.tally = Tally()
        """Counts of the current unit run, or of the last one."""
        self.loaded: tuple[str, str | None] = ("", None)
        """Stage and group of the context that the executor holds."""
        self._prefetches: dict[str, bool] = {}
        """Stage -> whether its workload has ``prefetch``, as an executor reported."""
        self._told: set[tuple[str, str]] = set()
        """(Stage, group) pairs that the executor was told to prefetch."""
        self._killing: set[tuple[str, str]] = set()
        """(Stage, group) pairs whose prefetch may have killed an executor."""
        self._lost_in = ("", "")
        """Stage and unit in which an executor last died; the next one must not prefetch there."""

    def run(self, assignment: Assignment) -> Outcome:
        """Attempt each pending item of the unit once.

        Raises:
            OSError: the journal could not be written or synced; the worker must end.
            WorkloadError: the code cannot be loaded; the unit was given back.
        """
        lines = PassLines(self._journal, self._clock, assignment)
        self.tally = lines.tally
        self._overtaken = False
        self._looked_at = self._clock.monotonic()
        state, unit = assignment.stage.state, assignment.unit.name
        order = state.running_order(unit)
        if assignment.died is not None and order:
            lines.owner_died(order)
            self._view.poll_journal(self._worker)
            order = state.running_order(unit)
        suspects = state.suspects(unit)
        for item in [i for i in order if i in suspects and is_killer(suspects[i])]:
            lines.killer(item, len(suspects[item]), suspects[item][-1])
            order.remove(item)
        histories = state.units[unit].histories
        if histories and any(self._is_last_try(assignment, item) for item in order):
            self.on_streak()
        try:
            outcome = self._execute(assignment, order, lines)
        except WorkloadError:
            lines.release()
            raise
        if outcome is not Outcome.OVERTAKEN:
            lines.release()
        self._sync()
        self.loaded = (assignment.stage.paths.name, assignment.stage.group_of(assignment.unit))
        return outcome

    def close(self) -> None:
        """End the executor."""
        self._units.close()
        if self._executor is not None:
            self._executor.end()
            self._executor.close()
            self._executor = None

    def _sync(self) -> None:
        self._journal.sync()
        self._synced_at = self._clock.monotonic()

    def _execute(self, assignment: Assignment, left: list[int], lines: PassLines) -> Outcome:
        unit = assignment.unit
        segment = assignment.stage.log.segments[unit.entry]
        items = self._units.lines(segment, unit) if left else []
        while left:
            if self.control.stop or self.control.hold:
                return Outcome.STOPPED if self.control.stop else Outcome.HELD
            weight = self._weight(assignment, left)
            stream = _Stream(lines, since=self._clock.monotonic(), weight=weight)
            if self._executor is None:
                self._executor = Executor(self._stages, self._log_path)
                self._told = set()
            request = self._request(assignment, left, weight) | self._hint(assignment)
            with suppress(BrokenPipeError):  # it died between two requests; _follow reports it
                self._executor.start(request, [items[i - unit.first] for i in left])
            how = self._follow(assignment, stream)
            left = left[stream.index :]
            outcome = self._after(assignment, left, stream, how)
            if outcome is not None:
                return outcome
        return Outcome.COMPLETE

    def _weight(self, assignment: Assignment, left: list[int]) -> int:
        """What a failure adds to the streak: more if an item of ``left`` failed in it before."""
        hurt = assignment.stage.state.streaks.of(self._worker).hurt
        again = hurt and any((assignment.unit.name, item) in hurt for item in left)
        return AGAIN_WEIGHT if again else 1

    def _after(
        self, assignment: Assignment, left: list[int], stream: _Stream, how: str
    ) -> Outcome | None:
        """Journal how a request ended; None if the items in ``left`` can be requested next."""
        if stream.broken is not None:
            message, _, hint = stream.broken.partition("\t")
            raise WorkloadError(message, hint=hint)
        if self._overtaken:
            return Outcome.OVERTAKEN
        outcome = None
        if how == "timeout" and left:
            stream.lines.timed_out(left.pop(0), assignment.stage.spec.timeout_s or 0.0)
            self.control.streak += stream.weight
        elif how == "aborted" or stream.end is not None:
            if stream.end not in ("", wire.FAILING):
                return Outcome.HELD if self._only_held else Outcome.STOPPED
        elif left and how != "again":
            stream.lines.executor_died(left, how, worker=self._worker, host=self._host)
            self._killing |= self._told
            self._lost_in = assignment.stage.paths.name, assignment.unit.name
            self.control.streak += DEATH_WEIGHT
            outcome = Outcome.DIED
        self._look_at_streak()
        return Outcome.HELD if outcome and self._only_held else outcome

    @staticmethod
    def _is_last_try(assignment: Assignment, item: int) -> bool:
        """Whether an item that failed before has one attempt left."""
        state = assignment.stage.state
        history = state.units[assignment.unit.name].histories.get(item)
        if history is None:
            return False
        spent = history.attempts(state.floor(assignment.unit.entry, item))
        return 0 < spent == state.max_attempts - 1

    @property
    def _only_held(self) -> bool:
        return self.control.hold and not (self.control.stop or self.control.abort)

    def _look_at_streak(self) -> None:
        """Call ``on_streak`` at the streak's limit; without a hold the next limit is double."""
        streak = self.control.streak
        if streak >= self.control.streak_limit:
            self.on_streak()
            self.control.streak_limit = streak + (
                1 if self.control.hold else max(streak, wire.STREAK)
            )

    def _hint(self, assignment: Assignment) -> dict[str, Any]:
        """The request's field about prefetching: a group, once per group and executor, or nothing.

        No prefetch in a unit in which an executor died: if the prefetch killed it, the next items
        would be blamed as well.
        """
        stage = assignment.stage.paths.name
        if self._lost_in == (stage, assignment.unit.name):
            return {"prefetch": False}
        group = self.ahead(assignment) if self._prefetches.get(stage, True) else None
        if group is None or (stage, group) in self._told | self._killing:
            return {}
        self._told.add((stage, group))
        return {"ahead": group}

    def _request(self, assignment: Assignment, left: list[int], weight: int) -> dict[str, Any]:
        stage = assignment.stage
        group = stage.group_of(assignment.unit)
        return {
            "stage": stage.paths.name,
            "unit": assignment.unit.name,
            "generation": assignment.generation,
            "positions": left,
            "deadline": self.control.deadline,
            "streak": max(1, (self.control.streak_limit - self.control.streak) // weight),
            "expected_s": stage.durations.seconds_of(group) if stage.durations.known else 0.0,
        }

    def _follow(self, assignment: Assignment, stream: _Stream) -> str:
        """Journal the executor's messages until the request ends; how it ended, or ""."""
        executor = self._executor
        assert executor is not None
        limit = assignment.stage.spec.timeout_s
        while True:
            before = stream.index
            self._read(executor, stream)
            if stream.end is not None or stream.broken is not None:
                return ""
            self._tick()
            self._steer(executor, assignment)
            now = self._clock.monotonic()
            if self.control.abort:
                return self._end(executor, stream, "aborted")
            if limit is not None and not stream.loading and now - stream.since > limit:
                return self._end(executor, stream, "timeout")
            if stream.index - before > 1:
                # Many quick results: let them accumulate instead of waking up for each.
                select.select([], [], [], _BATCH_S)
                continue
            ready = readable(
                executor.results,
                executor.ended,
                self._wake_fd,
                timeout_s=self._patience(stream, limit),
            )
            if executor.ended in ready:
                return self._end(executor, stream, "")
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)

    def _patience(self, stream: _Stream, limit: float | None) -> float:
        """Seconds until the worker must act even if the executor sends nothing."""
        now = self._clock.monotonic()
        longest = _SYNC_S if self._journal.dirty else _LOOK_S
        if self.control.stop:
            longest = _STOPPING_S
        if self.control.deadline is not None:
            longest = min(longest, self.control.deadline - now)
        if limit is not None and not stream.loading:
            longest = min(longest, stream.since + limit - now)
        return max(0.0, longest) + 0.001

    def _steer(self, executor: Executor, assignment: Assignment) -> None:
        now = self._clock.monotonic()
        if self._journal.dirty and now - self._synced_at > _SYNC_S:
            self._sync()
        if now - self._looked_at > _LOOK_S:
            self._looked_at = now
            claims = assignment.stage.claims
            self._overtaken |= claims.overtaken(assignment.unit.name, assignment.generation)
        if self.control.stop or self.control.hold or self._overtaken:
            executor.stop()

    def _end(self, executor: Executor, stream: _Stream, why: str) -> str:
        """End the executor; results that it had already sent still count."""
        before = stream.index
        how = executor.end()
        while self._read(executor, stream):
            continue
        executor.close()
        self._executor = None
        self.loaded = ("", None)
        if why == "timeout" and stream.index > before:
            return "again"  # the result came just in time; the rest is requested again
        return why or how

    def _read(self, executor: Executor, stream: _Stream) -> bool:
        """Read and journal the executor's new messages; return whether there were any."""
        try:
            data = os.read(executor.results, _READ)
        except BlockingIOError:
            return False
        if not data:
            return False
        *lines, stream.rest = (stream.rest + data).split(b"\n")
        for line in lines:
            self._take(line, stream)
        if stream.ready and not self._overtaken:
            stream.lines.append(b"".join(stream.ready))
        stream.ready.clear()
        stream.since = self._clock.monotonic()
        return True

    def _take(self, line: bytes, stream: _Stream) -> None:
        kind, body = line[:1], line[1:]
        if kind == wire.DONE:
            stream.index += 1
            stream.lines.tally.done += 1
            self.control.streak, self.control.streak_limit = 0, wire.STREAK
            stream.ready.append(seal_line(body))
        elif kind in (wire.FAILED, wire.PERMANENT):
            stream.index += 1
            stream.lines.tally.failed += 1
            self.control.streak += stream.weight if kind == wire.FAILED else 0
            stream.ready.append(seal_line(body))
        elif kind == wire.LOADING:
            stream.loading = True
        elif kind == wire.LOADED:
            stream.loading = False
        elif kind == wire.END:
            stream.end = body.decode()
        elif kind == wire.PREFETCHES:
            self._prefetches[stream.lines.stage] = body == b"yes"
        elif kind == wire.BROKEN:
            stream.broken = body.decode()
