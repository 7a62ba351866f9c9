"""Unit runs: send a unit's items to the executor and journal what happens (R4, R5, R15)."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.queue.items import UnitReader
from hpc_toolkit.queue.state import AGAIN_WEIGHT, DEATH_WEIGHT, is_killer
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.record import Record
from hpc_toolkit.worker import attempts as wire
from hpc_toolkit.worker.executor import Executor
from hpc_toolkit.worker.guard import kill_after
from hpc_toolkit.worker.membership import Counts
from hpc_toolkit.worker.unitlines import Stream, Tally, UnitLines

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.journal import JournalWriter
    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.rundir.valuefiles import ValueFile
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.worker.hosthealth import FailureCount
    from hpc_toolkit.worker.membership import Drain

_SYNC_S = 0.5
_TICK_S = 1.0
_STOPPING_S = 0.1
_BATCH_S = 0.002
_FEW = 8
"""The last items of a unit, whose results are not left to accumulate."""
_READ = 1 << 18


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


class UnitRunner(Record, frozen=False, stateful=True, kw_only=True):
    """Executes unit runs with one executor, which it keeps warm and replaces when it dies."""

    worker: str
    host: str
    view: RunView
    journal: JournalWriter
    clock: Clock
    drain: Drain
    failures: FailureCount
    next_group: Callable[[Assignment], str | None]
    """The group to prefetch while a unit runs, for workloads that can prefetch."""
    wake_fd: int
    """Readable when a signal has come."""
    tick: Callable[[], None]
    """Does the worker's periodic work; called at least once a second."""
    stages: Callable[[], dict[str, StageSpec]]
    """The stages for a new executor; WorkloadError: their code changed, and must not."""
    look_s: float
    """Seconds between two looks for a newer claim of the unit: the interval of heartbeats, which
    grows with the number of workers. A worker that was silent for a lease looks immediately."""

    def __post_init__(self) -> None:
        self.loaded: tuple[str, str | None] = ("", None)
        """Stage and group of the context that the executor holds."""
        self._executor: Executor | None = None
        self._units = UnitReader()
        self._values: ValueFile | None = None  # few runs have one
        self._synced_at = self._looked_at = self.clock.monotonic()
        self._overtaken = False
        self._tally = Tally()
        self._counted = Counts(0, 0, 0)
        self._prefetches: dict[str, bool] = {}
        """Stage -> whether its workload has ``prefetch``, as an executor reported."""
        self._hinted: set[tuple[str, str]] = set()
        """(Stage, group) pairs that the executor was asked to prefetch."""
        self._killing: set[tuple[str, str]] = set()
        """(Stage, group) pairs whose prefetch may have killed an executor."""
        self._ill = False
        """Whether the last item that the executor finished failed: its process may be the cause."""
        self._lost_in = ("", "")
        """Stage and unit in which an executor last died; the next one must not prefetch there."""

    @property
    def counts(self) -> Counts:
        """Counts of all unit runs, the current one included."""
        before, tally = self._counted, self._tally
        return Counts(
            before.done + tally.done, before.failed + tally.failed, before.deaths + tally.deaths
        )

    def run(self, assignment: Assignment) -> Outcome:
        """Attempt each pending item of the unit once.

        Raises OSError: the journal could not be written or synced; the worker must end;
        WorkloadError: the code cannot be loaded; the unit was released.
        """
        lines = UnitLines(self.journal, self.clock, assignment)
        self._counted, self._tally = self.counts, lines.tally
        self._overtaken = False
        self._looked_at = self.clock.monotonic()
        state, unit = assignment.stage.state, assignment.unit.name
        order = state.running_order(unit)
        if assignment.died is not None and order:
            lines.owner_died(order)
            self.view.poll_journal(self.worker)
            order = state.running_order(unit)
        suspects = state.suspects(unit)
        for item in [i for i in order if i in suspects and is_killer(suspects[i])]:
            lines.killer(item, len(suspects[item]), suspects[item][-1])
            order.remove(item)
        histories = state.units[unit].histories
        for item in [i for i in order if i in histories]:
            spent = histories[item].attempts(state.floor(assignment.unit.entry, item))
            if 0 < spent == state.max_attempts - 1:  # its last attempt would be on this host
                self.failures.check()
                break
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
        self._units.close()
        self._end_executor()

    def _sync(self) -> None:
        self.journal.sync()
        self._synced_at = self.clock.monotonic()

    def _execute(self, assignment: Assignment, left: list[int], lines: UnitLines) -> Outcome:
        unit = assignment.unit
        segment = assignment.stage.log.segments[unit.entry]
        items = self._units.lines(segment, unit) if left else []
        fragile = self._fragile(assignment, left)
        while left:
            if self.drain.requested or self.failures.hold:
                return self._stopped
            failed = assignment.stage.state.consecutive_failures.of(self.worker).failed
            again = bool(failed) and any((unit.name, item) in failed for item in left)
            weight = AGAIN_WEIGHT if again else 1
            if self._ill and left[0] in fragile:
                self._end_executor()
            if self._executor is None:
                self._executor = Executor(self.stages(), self.view.paths.worker_log(self.worker))
                self._hinted, self._ill = set(), False
            request = self._request(assignment, left, weight) | self._hint(assignment)
            if not fragile.isdisjoint(left[1:]):
                request |= {"failures_left": 1, "failures_in_a_row": 1}
            stream = Stream(
                lines=lines,
                where=wire.where(request),
                positions=left,
                failures=self.failures,
                drain=self.drain,
                weight=weight,
                since=self.clock.monotonic(),
            )
            with suppress(BrokenPipeError):  # it died between two requests; _follow reports it
                self._executor.start(request, [items[i - unit.first] for i in left])
            how = self._follow(assignment, stream)
            if stream.failed is not None:
                self._ill = stream.failed
            if stream.can_prefetch is not None:
                self._prefetches[assignment.stage.paths.name] = stream.can_prefetch
            left = left[stream.index :]
            outcome = self._after(assignment, left, stream, how)
            if outcome is not None:
                return outcome
        return Outcome.COMPLETE

    def _after(
        self, assignment: Assignment, left: list[int], stream: Stream, how: str
    ) -> Outcome | None:
        """Journal how a request ended; None if the items in ``left`` can be requested next."""
        if stream.broken is not None:
            message, _, hint = stream.broken.partition("\t")
            raise WorkloadError(message, hint=hint)
        if self._overtaken:
            return Outcome.OVERTAKEN
        outcome = None
        if how == "timeout" and left:
            spec = assignment.stage.spec
            permanent = "timeout" in spec.final
            stream.lines.timed_out(left.pop(0), spec.timeout_s or 0.0, permanent=permanent)
            if not permanent:
                self.failures.note_failure(stream.weight)
        elif stream.end == wire.WORN:
            self._end_executor()
        elif how == "aborted" or stream.end is not None:
            if stream.end not in ("", wire.FAILING):
                return self._stopped
        elif left and how != "again":
            stream.lines.executor_died(left, how, worker=self.worker, host=self.host)
            self._killing |= self._hinted
            self._lost_in = assignment.stage.paths.name, assignment.unit.name
            self.failures.note_failure(DEATH_WEIGHT)
            outcome = Outcome.DIED
        self.failures.check_if_many()
        held = outcome is not None and self._stopped is Outcome.HELD
        return Outcome.HELD if held else outcome

    @staticmethod
    def _fragile(assignment: Assignment, left: list[int]) -> set[int]:
        """Items that a process does not run after a failure, which it may have caused.

        A CUDA error or a leak would use up all attempts of an item in one process.
        """
        state, unit = assignment.stage.state, assignment.unit
        if state.max_attempts == 1:
            return set(left)
        histories = state.units[unit.name].histories
        return {
            i for i in left if i in histories and histories[i].attempts(state.floor(unit.entry, i))
        }

    @property
    def _stopped(self) -> Outcome:
        """The outcome of a unit run that ends early: a hold, unless the worker exits."""
        hold = self.failures.hold and not self.drain.requested
        return Outcome.HELD if hold else Outcome.STOPPED

    def _hint(self, assignment: Assignment) -> dict[str, Any]:
        """The request's field about prefetching: a group, once per group and executor, or nothing.

        No prefetch in a unit in which an executor died: if the prefetch killed it, the next items
        would be blamed as well.
        """
        stage = assignment.stage.paths.name
        if self._lost_in == (stage, assignment.unit.name):
            return {"prefetch": False}
        group = self.next_group(assignment) if self._prefetches.get(stage, True) else None
        if group is None or (stage, group) in self._hinted | self._killing:
            return {}
        self._hinted.add((stage, group))
        return {"next_group": group}

    def _request(self, assignment: Assignment, left: list[int], weight: int) -> dict[str, Any]:
        stage = assignment.stage
        group = stage.group_of(assignment.unit)
        return {
            "stage": stage.paths.name,
            "unit": assignment.unit.name,
            "generation": assignment.generation,
            "positions": left,
            "values": str(self.view.paths.values(self.worker)),
            "deadline": self.drain.deadline,
            "failures_left": self.failures.left(weight),
            "no_retry": stage.spec.final,
            "expected_s": stage.durations.seconds_of(group) if stage.durations.known else 0.0,
        }

    def _follow(self, assignment: Assignment, stream: Stream) -> str:
        """Journal the executor's messages until the request ends; how it ended, or ""."""
        executor = self._executor
        assert executor is not None
        limit, items = assignment.stage.spec.timeout_s, len(stream.positions)
        while True:
            before = stream.index
            self._read(executor, stream)
            if stream.wrong:
                return self._end(executor, stream, stream.wrong)
            if stream.end is not None or stream.broken is not None:
                return ""
            self.tick()
            self._steer(executor, assignment)
            now = self.clock.monotonic()
            if self.drain.interrupts:
                return self._end(executor, stream, "aborted")
            if limit is not None and not stream.loading and now - stream.since > limit:
                return self._time_out(executor, stream, kill_after(assignment.stage.spec))
            if stream.index - before > 1 and items - stream.index > _FEW:
                # Many quick results: let them accumulate instead of waking up for each.
                select.select([], [], [], _BATCH_S)
                continue
            patience_s = self._patience(stream, limit)
            ready = readable(executor.results, executor.ended, self.wake_fd, timeout_s=patience_s)
            # Slurm stops the processes of a suspended job; that time does not count.
            stream.since += max(0.0, self.clock.monotonic() - now - patience_s)
            if executor.ended in ready:
                return self._end(executor, stream, "")
            if self.wake_fd in ready:
                os.read(self.wake_fd, 4096)

    def _patience(self, stream: Stream, limit: float | None) -> float:
        """Seconds until the worker must act even if the executor sends nothing."""
        now = self.clock.monotonic()
        longest = _SYNC_S if self.journal.dirty else _TICK_S
        if self.drain.requested:
            longest = _STOPPING_S
        if self.drain.deadline is not None:
            longest = min(longest, self.drain.deadline - now)
        if limit is not None and not stream.loading:
            longest = min(longest, stream.since + limit - now)
        return max(0.0, longest) + 0.001

    def _steer(self, executor: Executor, assignment: Assignment) -> None:
        now = self.clock.monotonic()
        if self.journal.dirty and now - self._synced_at > _SYNC_S:
            self._sync()
        if now - self._looked_at > self.look_s:
            self._looked_at = now
            claims = assignment.stage.claims
            self._overtaken |= claims.overtaken(assignment.unit.name, assignment.generation)
        if self.drain.requested or self.failures.hold or self._overtaken:
            executor.stop()

    def _time_out(self, executor: Executor, stream: Stream, grace_s: float) -> str:
        """End an item whose time is up; its processes get SIGTERM ``grace_s`` before SIGKILL."""
        before = stream.index
        executor.stop()
        while self._read(executor, stream):
            continue
        if grace_s and stream.index == before:
            stream.deaf = True
            executor.terminate()
            end = self.clock.monotonic() + grace_s
            ended = False
            while not (ended or stream.end is not None or self.drain.interrupts):
                left_s = min(end - self.clock.monotonic(), _STOPPING_S)
                if left_s <= 0:
                    break
                fds = executor.results, executor.ended
                ended = executor.ended in readable(*fds, timeout_s=left_s)
                self._read(executor, stream)
                self.tick()
        how = self._end(executor, stream, "timeout", before)
        stream.end = None  # the executor ended the request because it was asked to
        return how

    def _sync_values(self) -> None:
        if self._values is None:
            from hpc_toolkit.rundir.valuefiles import ValueFile

            self._values = ValueFile(self.view.paths.values(self.worker))
        self._values.sync()

    def _end_executor(self) -> None:
        if self._executor is not None:
            self._executor.end()
            self._executor.close()
            self._executor = None
            self.loaded = ("", None)

    def _end(self, executor: Executor, stream: Stream, why: str, before: int | None = None) -> str:
        """End the executor; results that it had already sent still count."""
        before = stream.index if before is None else before
        how = executor.end()
        while self._read(executor, stream):
            continue
        executor.close()
        self._executor = None
        self.loaded = ("", None)
        if why == "timeout" and stream.index > before:
            return "again"  # the result came just in time; the rest is requested again
        return why or how

    def _read(self, executor: Executor, stream: Stream) -> bool:
        """Read and journal the executor's new messages; return whether there were any."""
        try:
            data = os.read(executor.results, _READ)
        except BlockingIOError:
            return False
        if not data:
            return False
        stream.take(data)
        if stream.ready and not self._overtaken:
            if stream.grown:
                self._sync_values()
                stream.grown = False
            stream.lines.append(b"".join(stream.ready))
        stream.ready.clear()
        stream.since = self.clock.monotonic()
        return True
