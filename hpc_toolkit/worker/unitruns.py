"""Unit runs: send a unit's items to the executor and journal what happens (R4, R5, R15)."""

from __future__ import annotations

import math
import os
import select
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import WorkloadError
from hpc_toolkit.queue.state import AGAIN_WEIGHT, DEATH_WEIGHT
from hpc_toolkit.queue.units import UnitReader
from hpc_toolkit.rundir.journal import ValueFile
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.record import Record
from hpc_toolkit.worker import attempts as wire
from hpc_toolkit.worker.membership import Counts
from hpc_toolkit.worker.starting import Executor
from hpc_toolkit.worker.unitlines import (
    Outcome,
    Stream,
    Tally,
    UnitLines,
    fragile_of,
    limits_of,
    order_for,
    ran_out,
    request_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.queue.assignment import Assignment
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.rundir.journal import JournalWriter
    from hpc_toolkit.rundir.layout import StageSpec
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.worker.hosthealth import FailureCount
    from hpc_toolkit.worker.membership import Drain

_SYNC_S = 0.5
_TICK_S = 1.0
_STOPPING_S = 0.1
_BATCH_S = 0.002
_COMMAND_GRACE_S = 5.0
_FEW = 8
"""The last items of a unit, whose results are not left to accumulate."""
_OF_EXECUTOR = ("loaded", "_executor", "_answering", "_prefetches", "_hinted", "_ill")
"""What a runner knows of its executor, which outlives a name of its worker."""


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
    holds: Callable[[StageSpec, int], bool] = lambda _spec, _growth: True
    """As for :class:`Picker`."""

    def __post_init__(self) -> None:
        self.loaded: tuple[str, str | None] = ("", None)
        """Stage and group of the context that the executor holds."""
        self._executor: Executor | None = None
        self._units = UnitReader()
        self._values = ValueFile(self.view.paths.values(self.worker))
        self._synced_at = self._looked_at = self.clock.monotonic()
        self._overtaken = False
        self._tally = Tally()
        self._counted = Counts(0, 0, 0)
        self._prefetches = True
        """Whether no executor has died: a prefetch may have killed it, and would kill more."""
        self._hinted: set[tuple[str, str]] = set()
        """(Stage, group) pairs that the executor was asked to prefetch."""
        self._ill = False
        """Whether the last item that the executor finished failed: its process may be the cause."""
        self._answering: tuple[Assignment, Stream] | None = None
        """The request that the executor answers now."""
        self.held: tuple[str, str] | None = None
        """Stage and unit of a unit run that is not over."""

    @property
    def counts(self) -> Counts:
        """Counts of all unit runs, the current one included."""
        before, tally = self._counted, self._tally
        return Counts(
            before.done + tally.done, before.failed + tally.failed, before.deaths + tally.deaths
        )

    def run(self, assignment: Assignment) -> Outcome:
        """Attempt each pending item of the unit once.

        Raises OSError: the journal could not be written or synced; this name of the worker must
        end; WorkloadError: the code cannot be loaded; the unit was released.
        """
        self.held = assignment.stage.paths.name, assignment.unit.name
        self.settle()
        lines = UnitLines(self.journal, self.clock, assignment)
        self._counted, self._tally = self.counts, lines.tally
        self._overtaken = False
        self._looked_at = self.clock.monotonic()
        holds = partial(self.holds, assignment.stage.specs.of(assignment.unit))
        order = order_for(assignment, lines, partial(self.view.poll_journal, self.worker), holds)
        if _is_last_attempt(assignment, order):  # it would be on this host
            self.failures.check()
        try:
            outcome = self._execute(assignment, order, lines)
        except WorkloadError:
            lines.release()
            raise
        if outcome is not Outcome.OVERTAKEN:
            lines.release()
        self._sync()
        self.loaded = (assignment.stage.paths.name, assignment.stage.group_of(assignment.unit))
        self.held = None
        return outcome

    def adopt(self, former: UnitRunner) -> None:
        """Take the executor of the worker's former name, and the request that it answers."""
        for name in _OF_EXECUTOR:
            setattr(self, name, getattr(former, name))
        if self._executor is None:
            self._answering = None
        former._executor = None
        former.close()

    @property
    def is_answered(self) -> bool:
        """Whether the executor may still send results that no journal has."""
        return self._answering is not None and self._executor is not None

    def stop(self) -> None:
        """Ask the executor to stop after the running item; its results wait in the pipe."""
        if self._executor is not None:
            self._executor.stop()

    def settle(self) -> None:
        """Journal the rest of a request that was made under the worker's former name.

        Its lines keep the generation of that name: the items began under it, and an attempt that
        is written by both names counts once.
        """
        if self._answering is None:
            return
        assignment, stream = self._answering
        stream.lines.move(self.journal)
        stream.failures = self.failures
        self._counted, self._tally = self.counts, stream.lines.tally
        # The next generation is probably this worker's own, and a result is never thrown away.
        self._overtaken, self._looked_at = False, math.inf
        how = self._answers(assignment, stream)
        self._after(assignment, stream.positions[stream.index :], stream, how)
        self._sync()
        self.view.poll_journal(self.worker)

    def close(self) -> None:
        self._units.close()
        self._end_executor()

    def _sync(self) -> None:
        self.journal.sync()
        self._synced_at = self.clock.monotonic()

    def _execute(self, assignment: Assignment, left: list[int], lines: UnitLines) -> Outcome:
        unit = assignment.unit
        segment = assignment.stage.log.segments[unit.entry]
        items = self._units.read(segment, unit)[0] if left else []
        fragile = fragile_of(assignment, left)
        while left:
            if self.drain.requested or self.failures.hold:
                return self._stopped
            failed = assignment.stage.state.consecutive_failures[self.worker].failed
            again = bool(failed) and any((unit.name, item) in failed for item in left)
            weight = AGAIN_WEIGHT if again else 1
            if self._ill and left[0] in fragile:
                self._end_executor()
            if self._executor is None:
                log, stage = self.view.paths.worker_log(self.worker), assignment.stage.paths.name
                self._executor = Executor(self.stages(), log, stage)
                self._hinted, self._ill = set(), False
            request = request_for(assignment, left, self._values.path, self.drain)
            request |= self._hint(assignment) | {"failures_left": self.failures.left(weight)}
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
                loading=self._executor.starting,
                **limits_of(assignment, left),
            )
            self._answering = assignment, stream
            with suppress(BrokenPipeError):  # it died between two requests; _follow reports it
                self._executor.start(request, [items[i - unit.first] for i in left])
            how = self._answers(assignment, stream)
            left = left[stream.index :]
            outcome = self._after(assignment, left, stream, how)
            if outcome is not None:
                return outcome
        return Outcome.COMPLETE

    def _answers(self, assignment: Assignment, stream: Stream) -> str:
        how = self._follow(assignment, stream)
        self._answering = None
        if stream.failed is not None:
            self._ill = stream.failed
        return how

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
            permanent, limit_s = "timeout" in spec.final, stream.running_limit_s or 0.0
            stream.lines.timed_out(item := left.pop(0), limit_s, permanent=permanent)
            if not permanent:
                stream.note_failure(item, "timeout")
        elif stream.end == wire.WORN:
            self._end_executor()
        elif how == "aborted" or stream.end is not None:
            if stream.end not in ("", wire.FAILING):
                return self._stopped
        elif left and how != "again":
            self._prefetches = False
            if ran_out(assignment, how):
                seconds = self.clock.monotonic() - stream.since
                stream.lines.out_of_memory(item := left.pop(0), f"executor {how}", seconds)
                stream.note_failure(item, "oom")
            else:
                stream.lines.executor_died(left, how, worker=self.worker, host=self.host)
                self.failures.note_failure(DEATH_WEIGHT)
                outcome = Outcome.DIED
        self.failures.check_if_many()
        held = outcome is not None and self._stopped is Outcome.HELD
        return Outcome.HELD if held else outcome

    @property
    def _stopped(self) -> Outcome:
        """The outcome of a unit run that ends early: a hold, unless the worker exits."""
        hold = self.failures.hold and not self.drain.requested
        return Outcome.HELD if hold else Outcome.STOPPED

    def _hint(self, assignment: Assignment) -> dict[str, Any]:
        """The request's field about prefetching: a group, once for each executor, or nothing."""
        if not self._prefetches:
            return {"prefetch": False}
        stage, group = assignment.stage.paths.name, self.next_group(assignment)
        if group is None or (stage, group) in self._hinted:
            return {}
        self._hinted.add((stage, group))
        return {"next_group": group}

    def _follow(self, assignment: Assignment, stream: Stream) -> str:
        """Journal the executor's messages until the request ends; how it ended, or ""."""
        executor = self._executor
        assert executor is not None
        while True:
            before = stream.index
            self._read(executor, stream)
            if stream.wrong:
                return self._end(executor, stream, stream.wrong)
            if stream.end is not None or stream.broken is not None:
                return ""
            self.tick()
            self._steer(executor, assignment)
            now, limit = self.clock.monotonic(), stream.running_limit_s
            if self.drain.interrupts:
                return self._end(executor, stream, "aborted")
            if limit is not None and not stream.loading and now - stream.since > limit:
                spec = assignment.stage.spec
                default_s = _COMMAND_GRACE_S if spec.workload.command is not None else 0.0
                grace_s = default_s if spec.kill_after_s is None else spec.kill_after_s
                return self._time_out(executor, stream, grace_s)
            if stream.index - before > 1 and len(stream.positions) - stream.index > _FEW:
                # Many quick results: let them accumulate instead of waking up for each.
                select.select([], [], [], _BATCH_S)
                continue
            patience_s = self._patience(stream, limit)
            ready = readable(executor.results, executor.ended, self.wake_fd, timeout_s=patience_s)
            # Slurm stops the processes of a suspended job; that time does not count.
            stream.since += max(0.0, self.clock.monotonic() - now - patience_s)
            if executor.ended in ready and executor.has_ended():
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
        self._executor = None
        self.loaded = ("", None)
        while stream.receive(executor.results):
            continue
        executor.close()
        stream.write(self.journal, self._values, overtaken=self._overtaken)
        if why == "timeout" and stream.index > before:
            return "again"  # the result came just in time; the rest is requested again
        return why or how

    def _read(self, executor: Executor, stream: Stream) -> bool:
        """Read and journal the executor's new messages; return whether there were any."""
        if found := stream.receive(executor.results):
            stream.write(self.journal, self._values, overtaken=self._overtaken)
        return found


def _is_last_attempt(assignment: Assignment, order: list[int]) -> bool:
    """Whether an item that failed before has one attempt left."""
    state, unit = assignment.stage.state, assignment.unit
    known, floor = state.units[unit.name].histories, state.floor
    spent = (known[item].attempts(floor(unit.entry, item)) for item in order if item in known)
    return any(0 < one == state.max_attempts - 1 for one in spent)
