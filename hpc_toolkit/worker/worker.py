"""The worker: one rank's supervising process, which claims units, journals and sends heartbeats.

It runs no user code. Exit codes: 0, every stage is sealed and has no pending item; 75, items are
left (time is up, a drain, a full disk); 1, the run is paused or its code cannot be loaded.
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError, WorkloadError
from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, Liveness
from hpc_toolkit.queue.left import Rest, pending_needs
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.presence import LIMIT_S
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.queue.wants import may_need
from hpc_toolkit.rundir.layout import CALLS, refuse_removed
from hpc_toolkit.rundir.trust import believed
from hpc_toolkit.system.installation import open_streams
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.ranks import RankInfo, of_slurm
from hpc_toolkit.system.record import Record, fresh
from hpc_toolkit.worker.code import executed
from hpc_toolkit.worker.hiccups import Continuity
from hpc_toolkit.worker.hosthealth import HostWatch
from hpc_toolkit.worker.membership import Membership
from hpc_toolkit.worker.node import Node, watch_if_due
from hpc_toolkit.worker.slurmliveness import MISSED, SlurmLiveness
from hpc_toolkit.worker.starting import FORK_SERVER, prepare_steps
from hpc_toolkit.worker.unitlines import Outcome
from hpc_toolkit.worker.unitruns import UnitRunner

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Probes
    from hpc_toolkit.queue.view import StageView
    from hpc_toolkit.rundir.layout import Manifest, RunPaths, StageSpec
    from hpc_toolkit.rundir.trust import Proof
    from hpc_toolkit.system.clock import Clock

EXIT_COMPLETE = 0

_HOLD_POLL_S = 0.2
_GROUPED_S = 0.1
"""Seconds for which items that follow others wait while the worker has others, as short ones."""
_PATIENCE_S = 0.5
"""Seconds that items of a later stage are left to the worker that has the results for them."""
_STARTS_S = 20.0
"""Seconds that a worker started by hand waits for others that have what items need."""


class WorkerOptions(Record, kw_only=True):
    """Settings of one worker, fixed at its start."""

    lease_s: float = DEFAULT_LEASE_S
    """Seconds of silence after which a worker counts as dead; locks or Slurm may show it sooner."""
    deadline: float | None = None
    """Epoch seconds by which this worker must have exited; None: no limit."""
    idle_exit_s: float | None = None
    """Exit after this many seconds without work; None: wait indefinitely."""
    grace_s: float = 25.0
    """Seconds that the running item may still take after a signal or a request to drain."""
    strict_code: bool = False
    """Refuse code that changed since the run was created; False: warn."""
    pool: int = 0
    """Process id of the pool that started this worker; 0: none."""
    rank: RankInfo | None = None
    """Its rank among the workers of all pools; None: that of its environment."""
    has: dict[str, Any] = fresh(factory=dict)
    """What it has for stages with needs, instead of what it sees (``system.needs.Amounts``)."""
    argv: tuple[str, ...] = ()
    """``sys.argv`` of the script whose calls are run; (): as when the run was created."""

    def kept(self, paths: RunPaths, clock: Clock) -> Continuity:
        """What a worker with these settings keeps from one of its names to the next."""
        ends = {"deadline": self.deadline, "idle_exit_s": self.idle_exit_s}
        return Continuity(paths, clock, grace_s=self.grace_s, **ends)


class Worker:
    """One name of a worker; an instance serves one call of :meth:`run`."""

    def __init__(
        self,
        paths: RunPaths,
        manifest: Manifest,
        options: WorkerOptions,
        clock: Clock,
        kept: Continuity | None = None,
    ) -> None:
        """Raises OSError: as :meth:`run`."""
        kept = kept or options.kept(paths, clock)
        self._options, self._clock, self._kept = options, clock, kept
        rank = options.rank or RankInfo.from_environ()
        proof, lease_s = _believed(paths, options.lease_s)
        limits = [stage.log_limit_mib for stage in manifest.stages]
        limit = max((mib << 20 if mib else math.inf for mib in limits), default=math.inf)
        self._has = _resources(manifest, options, rank, clock)
        self._member = own = kept.join(
            lambda name: Membership(
                paths, rank, clock, lease_s, limit, name=name, pool=options.pool, has=self._has
            )
        )
        self.name = own.name
        self._drain = kept.drain
        limit_s = None if own.local else LIMIT_S
        self._view = view = RunView(paths, manifest, local=own.local, limit_s=limit_s)
        view.readers[own.name] = own.journal.reader()
        self._liveness = liveness = Liveness(
            paths,
            clock,
            host=own.presence.host,
            boot=own.presence.boot,
            lease_s=lease_s,
            job=own.presence.job,
            restart=own.presence.restart,
            cluster=own.presence.cluster,
            locks_proven=proof.locks,
            probes=view.probes,
        )
        self._control = ControlReader(paths)
        self._slurm = SlurmLiveness(paths.root, clock)
        self._picker = Picker(
            view,
            liveness,
            clock,
            own.name,
            shared=not own.local,
            rank=rank.rank,
            world_size=rank.world_size,
            restarted=rank.restart > 0,
            holds=self._holds,
        )
        self._rest = Rest(self._picker, options.idle_exit_s or _STARTS_S)
        # What is left to do here raises no OSError, after which others would wait for this one.
        self._node = Node(paths.root, own.name, clock, local=own.local)
        self._pacing = Pacing(
            clock,
            local=own.local,
            workers=own.workers,
            lease_s=lease_s,
            seed=own.name,
            watchers=self._node.of_the_step(own.workers),
        )
        every_s = self._pacing.judge_s
        self._host_watch = HostWatch(
            view=view, liveness=liveness, clock=clock, own=own.presence, every_s=every_s
        )
        self._runner = UnitRunner(
            worker=own.name,
            host=own.presence.host,
            view=view,
            journal=own.journal,
            clock=clock,
            drain=self._drain,
            failures=self._host_watch,
            next_group=self._picker.next_group,
            wake_fd=kept.wake_fd,
            tick=self._tick,
            stages=partial(
                executed, paths, manifest, strict=options.strict_code, argv=options.argv
            ),
            look_s=own.presence.interval_s,
            holds=self._holds,
        )
        kept.keep(self._runner)
        self._stage: StageView | None = None
        self._claim = ""
        self._idle_since: float | None = None
        self._followed_at, self._owes = float("-inf"), False

    def run(self) -> int:
        """Work until nothing is left; the exit code. Raises OSError: this name must end."""
        try:
            code = self._main()
        except WorkloadError:
            self._leave("the workload cannot be loaded")
            raise
        self._leave(self._drain.reason)
        return code

    @property
    def probes(self) -> Probes:
        return self._view.probes

    def drop(self) -> None:
        """Forget everything but what the next name of this worker gets."""
        self._slurm.close()
        self._node.close()

    def _main(self) -> int:
        if self._kept.held is not None:
            taken = self._picker.take_back(*self._kept.held, self._kept.wrote)
            self._kept.held = None
            self._work(taken)
        self._runner.settle()
        while True:
            self._tick()
            if self._drain.requested:
                # The list of an executor's calls stays open, and nothing is left of it.
                calls = all(s.spec.workload.function == CALLS for s in self._view.stages.values())
                left = any(stage.state.open for stage in self._view.stages.values())
                return TRY_AGAIN if left or not calls else EXIT_COMPLETE
            holds = self._host_watch.holds()
            assignment = None if holds else self._picker.next(self._runner.loaded, self._pacing)
            if assignment is not None:
                self._work(assignment)
            elif any(self._follow(0.0 if self._owes else _PATIENCE_S)):
                self._pacing.worked()
            elif self._picker.reported_complete or (holds and self._view.complete):
                # A hint in ``head`` that saves waiting workers reading all journals.
                with suppress(OSError):
                    for stage in self._view.stages.values():
                        stage.log.report_complete()
                refuse_removed(self._view.paths.root)  # with the results that its view has
                return EXIT_COMPLETE
            elif self._rest.is_for_others:
                self._view.poll()  # others may have done what seemed to be left
                if not self._view.complete:
                    self._drain.request(self._not_for_it(), 0.0)
            else:
                self._wait()

    def _holds(self, spec: StageSpec, growth: int) -> bool:
        """Whether this worker has what items need whose needs grew ``growth`` times."""
        if not (spec.needs or growth):
            return True
        from hpc_toolkit.system.needs import needs_after  # few runs have needs

        return not self._lacks(needs_after(spec, growth))

    def _lacks(self, needs: dict[str, Any]) -> list[str]:
        from hpc_toolkit.system.needs import lacking

        end = self._drain.deadline
        left_s = math.inf if end is None else end - self._clock.monotonic()
        missing = lacking(needs, self._has, left_s)
        # It never has time without an end, so what else it lacks comes first.
        return [one for one in missing if one != "time"] or missing

    def _not_for_it(self) -> str:
        """What is left, and what this worker lacks for it, in one line that is also printed."""
        from hpc_toolkit.system.needs import shown

        lacks: dict[str, None] = {}
        for name, stage in self._view.stages.items():
            left = [one.needs for one in pending_needs(stage)] or [stage.spec.needs or {}]
            for needs in () if stage.complete else left:
                lacks |= {f"{name} ({shown(one, needs[one])})": None for one in self._lacks(needs)}
        reason = f"what is left needs more than this worker has: {', '.join(lacks)}"
        sys.stderr.write(f"{self.name}: {reason}\n")
        return reason

    def _work(self, assignment: Assignment | None) -> None:
        """Run a unit, again after each death of its executor."""
        self._idle_since = None
        self._pacing.worked()
        while assignment is not None:
            self._stage = assignment.stage
            self._claim = f"{assignment.name}.{assignment.generation}"
            failed_before = self._runner.counts.failed
            began = self._clock.monotonic()
            outcome = self._runner.run(assignment)
            self._view.poll_journal(self.name)
            self._follow_if_due(began)
            if self._runner.counts.failed > failed_before:
                counts = self._runner.counts
                self._host_watch.judge_run(self._stage, counts.failed, counts.done)
            if self._host_watch.pause:
                self._leave(self._host_watch.pause)
                hint = "see 'hpctk status'; fix the cause, 'hpctk retry' and start workers again"
                raise HpcToolkitError(self._host_watch.pause, hint=hint)
            if outcome is Outcome.STOPPED:
                self._drain.request("no time for another item", 0.0)
            stops = self._drain.requested or self._host_watch.hold
            again = outcome is Outcome.DIED and not stops
            assignment = self._picker.again(assignment) if again else None
        self._claim = ""

    def _follow_if_due(self, began: float) -> None:
        """Add what follows the unit that ``began`` then; after short units, not each time.

        A segment costs several syncs, which is much beside items of milliseconds. Should the next
        item take long, workers that wait add what can be added.
        """
        since = self._clock.monotonic() - min(began, self._followed_at)
        self._owes = since < _GROUPED_S and self._picker.has_fresh
        if not self._owes:
            self._follow()

    def _follow(self, patience_s: float = 0.0) -> list[bool]:
        """Add items to stages that follow others; whether there were any, for each stage."""
        now = self._followed_at = self._clock.monotonic()
        self._owes = False
        return [one.publish(now, patience_s) for one in self._picker.following.values()]

    def _wait(self) -> None:
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        limit = self._options.idle_exit_s
        if limit is not None and now - self._idle_since >= limit:
            self._drain.request(f"nothing to do for {limit:g} s", 0.0)
            return
        wait_s = _HOLD_POLL_S if self._host_watch.hold else self._pacing.wait_s
        fds = [self._kept.wake_fd, *self._node.wake_fds]
        if self._kept.wake_fd in readable(*fds, timeout_s=wait_s):
            os.read(self._kept.wake_fd, 4096)

    def _tick(self) -> None:
        """Do the periodic work: reasons to exit, heartbeat, requests, other workers."""
        counts = self._runner.counts
        self._drain.check_deadline()
        self._host_watch.judge_run_if_due(self._stage, counts.failed, counts.done)
        if self._host_watch.pause:
            self._drain.request(self._host_watch.pause, math.inf)
        if self._host_watch.reason:
            self._drain.request(self._host_watch.reason, 0.0)
        who = {"node": self._node.watches_for, "workers": self._pacing.watchers}
        self._member.beat_if_due(counts, self._drain, claim=self._claim, **who)
        self._member.trim_log()
        requests = watch_if_due(self._node, self._picker, self._pacing, self._control)
        if requests is None:
            return
        for request in requests:
            if not request.workers.isdisjoint(self._kept.names):
                self._drain.request(f"asked to drain by {request.name}", self._options.grace_s)
        if self._node.observes and of_slurm(self._member.presence.job):
            own, silent = self._member.presence, self._liveness.silent(missed=MISSED)
            self._slurm.ask(silent, own, self._control.asked[own.cluster])
        self._picker.help_first |= self._host_watch.take(self._control.health)

    def _leave(self, reason: str) -> None:
        self._runner.close()
        self._slurm.close()
        self._node.close()
        self._member.finish(self._runner.counts, reason)


def _resources(
    manifest: Manifest, options: WorkerOptions, rank: RankInfo, clock: Clock
) -> dict[str, Any]:
    """What this worker has; {} if no stage of the run has needs, or items that get more time."""
    if not any(may_need(stage) for stage in manifest.stages):
        return {}
    from hpc_toolkit.system.binding import own_place
    from hpc_toolkit.system.gpus import ranks_here
    from hpc_toolkit.system.needs import own_resources

    ranks = 1 if not rank.in_step else ranks_here(os.environ)
    end = options.deadline
    time = {} if end is None else {"time": max(0, round(end - clock.wall()))}
    return own_resources(own_place(), time | options.has, ranks)


def _believed(paths: RunPaths, lease_s: float) -> tuple[Proof, float]:
    """What doctor proved about the filesystem, and a lease no shorter than it measured."""
    proof = believed(paths)
    if lease_s < proof.least_lease_s:
        least, why = f"{proof.least_lease_s:g} s", "changes show late here, as doctor measured"
        sys.stderr.write(f"note: the lease is {least}, not {lease_s:g} s: {why}\n")
    return proof, max(lease_s, proof.least_lease_s)


def start_worker(paths: RunPaths, manifest: Manifest, options: WorkerOptions, clock: Clock) -> int:
    """Run one worker until nothing is left to do; return the exit code."""
    open_streams()
    if "SLURM_STEP_ID" in os.environ:
        prepare_steps()
    kept = options.kept(paths, clock)
    kept.listen()
    worker: Worker | None = None
    try:
        while True:
            try:
                worker = None
                worker = Worker(paths, manifest, options, clock, kept)
                return worker.run()
            except OSError as error:
                if worker is not None:
                    worker.drop()
                kept.wait(error, None if worker is None else worker.probes)
    finally:
        FORK_SERVER.stop()
        kept.let_go(None if worker is None else worker.probes)
