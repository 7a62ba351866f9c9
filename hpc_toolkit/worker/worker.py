"""The worker: one rank's supervising process, which claims units, journals and sends heartbeats.

It runs no user code. Exit codes: 0, every stage is sealed and has no pending item; 75, items are
left (time is up, a drain, a full disk); 1, the run is paused or its code cannot be loaded.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError, RunError, WorkloadError
from hpc_toolkit.queue.assignment import Assignment, Picker
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, Liveness
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.probes import LIMIT_S, LOCK
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import CALLS
from hpc_toolkit.rundir.proof import believed
from hpc_toolkit.system.imports import open_streams
from hpc_toolkit.system.processes import WARNING, readable
from hpc_toolkit.system.ranks import RankInfo
from hpc_toolkit.system.record import Record
from hpc_toolkit.worker.code import executed
from hpc_toolkit.worker.hosthealth import HostWatch
from hpc_toolkit.worker.membership import Drain, Membership
from hpc_toolkit.worker.pausing import PauseRule
from hpc_toolkit.worker.slurmliveness import MISSED, SlurmLiveness
from hpc_toolkit.worker.unitruns import Outcome, UnitRunner

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import StageView
    from hpc_toolkit.rundir.layout import Manifest, RunPaths
    from hpc_toolkit.rundir.proof import Proof
    from hpc_toolkit.system.clock import Clock

EXIT_COMPLETE = 0

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, WARNING)
"""Signals that ask a worker to finish its item and exit."""

_HOLD_POLL_S = 0.2


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
    argv: tuple[str, ...] = ()
    """``sys.argv`` of the script whose calls are run; (): as when the run was created."""


class Worker:
    """One worker of a run; an instance serves one call of :meth:`run`."""

    def __init__(
        self, paths: RunPaths, manifest: Manifest, options: WorkerOptions, clock: Clock
    ) -> None:
        self._paths, self._options, self._clock = paths, options, clock
        rank = RankInfo.from_environ()
        proof, lease_s = _believed(paths, options.lease_s)
        limits = [stage.log_limit_mib for stage in manifest.stages]
        limit = max((mib << 20 if mib else math.inf for mib in limits), default=math.inf)
        self._member = own = Membership(paths, rank, clock, lease_s, limit)
        self.name = own.name
        self._drain = Drain(clock, options.deadline)
        self._pacing = Pacing(
            clock, local=own.local, workers=own.workers, lease_s=lease_s, seed=own.name
        )
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
        )
        every_s = self._pacing.judge_s
        self._host_watch = HostWatch(
            view=view, liveness=liveness, clock=clock, own=own.presence, every_s=every_s
        )
        self._pause = PauseRule(self._host_watch, clock, every_s)
        self._wake_fd, self._wake_write = os.pipe()
        self._runner = UnitRunner(
            worker=own.name,
            host=own.presence.host,
            view=view,
            journal=own.journal,
            clock=clock,
            drain=self._drain,
            failures=self._host_watch,
            next_group=self._picker.next_group,
            wake_fd=self._wake_fd,
            tick=self._tick,
            stages=partial(
                executed, paths, manifest, strict=options.strict_code, argv=options.argv
            ),
            look_s=own.presence.interval_s,
        )
        self._signals = 0
        self._stage: StageView | None = None
        self._idle_since: float | None = None

    def run(self) -> int:
        self._install_signals()
        try:
            code = self._main()
        except WorkloadError:
            self._leave("the workload cannot be loaded")
            raise
        except OSError as error:
            # Items whose results were not synced run again; nothing more may be written.
            self._runner.close()
            self._member.give_up(error)
            raise unwritable(self._paths, error) from error
        self._leave(self._drain.reason)
        return code

    def let_go(self) -> None:
        """Release the lock: a process that exits with it held waits for the file server."""
        # That takes 90 s if an NFSv3 server has just started. The release runs in a thread:
        # on NFS, a thread that waits does not delay the end of the process.
        with suppress(OSError):
            self._view.probes.look(LOCK, self.name, self._member.lock.release)

    def _install_signals(self) -> None:
        for fd in (self._wake_fd, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for sig in DRAIN_SIGNALS:
            signal.signal(sig, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, DRAIN_SIGNALS)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals += 1
        grace_s = self._options.grace_s
        if number == WARNING and self._drain.deadline is not None:
            # It comes minutes before the deadline: the running item has until then.
            grace_s = max(grace_s, self._drain.deadline - self._clock.monotonic())
        if self._signals > 1 and number == signal.SIGINT:
            grace_s = 0.0
        self._drain.request(f"got {signal.Signals(number).name}", grace_s)

    def _main(self) -> int:
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
            elif self._picker.reported_complete or (holds and self._view.complete):
                # A hint in ``head`` that saves waiting workers reading all journals.
                with suppress(OSError):
                    for stage in self._view.stages.values():
                        stage.log.report_complete()
                return EXIT_COMPLETE
            else:
                self._wait()

    def _work(self, assignment: Assignment | None) -> None:
        """Run a unit, again after each death of its executor."""
        self._idle_since = None
        self._pacing.worked()
        while assignment is not None:
            self._stage = assignment.stage
            failed_before = self._runner.counts.failed
            outcome = self._runner.run(assignment)
            self._view.poll_journal(self.name)
            if self._runner.counts.failed > failed_before:
                self._pause.judge(self._stage, self._runner.counts)
            if self._pause.reason:
                self._leave(self._pause.reason)
                hint = "see 'hpctk status'; fix the cause, 'hpctk retry' and start workers again"
                raise PausedError(self._pause.reason, hint=hint)
            if outcome is Outcome.STOPPED:
                self._drain.request("no time for another item", 0.0)
            stops = self._drain.requested or self._host_watch.hold
            again = outcome is Outcome.DIED and not stops
            assignment = self._picker.again(assignment) if again else None

    def _wait(self) -> None:
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        limit = self._options.idle_exit_s
        if limit is not None and now - self._idle_since >= limit:
            self._drain.request(f"nothing to do for {limit:g} s", 0.0)
            return
        wait_s = _HOLD_POLL_S if self._host_watch.hold else self._pacing.wait_s
        if readable(self._wake_fd, timeout_s=wait_s):
            os.read(self._wake_fd, 4096)

    def _tick(self) -> None:
        """Do the periodic work: reasons to exit, heartbeat, requests, other workers."""
        counts = self._runner.counts
        self._drain.check_deadline()
        self._pause.judge_if_due(self._stage, counts)
        if self._pause.reason:
            self._drain.request(self._pause.reason, math.inf)
        if self._host_watch.reason:
            self._drain.request(self._host_watch.reason, 0.0)
        self._member.beat_if_due(counts, self._drain)
        self._member.trim_log()
        if self._pacing.watch_due():
            self._read_control()
            self._picker.notice_deaths(self._pacing.at_most)
            if self._liveness.speaks(self._member.presence, missed=MISSED):
                self._slurm.ask(self._liveness.silent(missed=MISSED))
            self._pacing.watched(self._picker.watch.living, self._picker.watch.lease_left_s)

    def _read_control(self) -> None:
        requests, notices = self._control.poll()
        for request in requests:
            if self.name in request.workers:
                self._drain.request(f"asked to drain by {request.name}", self._options.grace_s)
        for notice in notices:
            self._liveness.take_notice(notice)
        self._picker.help_first |= self._host_watch.take(self._control.health)

    def _leave(self, reason: str) -> None:
        self._runner.close()
        self._slurm.close()
        self._member.finish(self._runner.counts, reason)


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
    if "SLURM_STEP_ID" in os.environ:  # the step has all of the node's resources
        os.environ.setdefault("SLURM_OVERLAP", "1")
        os.environ.pop("SLURM_LABELIO", None)  # by which srun in an item would alter its result
    try:
        worker = Worker(paths, manifest, options, clock)
    except OSError as error:
        raise unwritable(paths, error) from error
    try:
        return worker.run()
    finally:
        worker.let_go()


def unwritable(paths: RunPaths, error: OSError) -> RunError:
    """The error of a worker that cannot write; exit code 75 unless permissions forbid it."""
    if isinstance(error, NotADirectoryError):
        return files.misplaced(error)
    message = f"a worker cannot write to {paths.root}: {error.strerror}"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RunError(message, hint="check the owner, the permissions and the mount")
    again = "start workers again; nothing is lost"
    hint = f"fix that and {again}"
    if error.errno == errno.ESHUTDOWN:
        remount = "on CephFS, mount the filesystem again"  # Lustre connects again by itself
        hint = f"the file server has evicted this host; {remount}, then {again}"
    gone = files.missing_directory(error)
    if gone is not None:
        message = f"the worker stops: {gone} is missing"
        hint = f"'hpctk doctor {paths.root}' shows what else is lost"
        if gone.name == "claims":
            hint = f"'hpctk doctor {paths.root} --repair' rebuilds it; no result is lost"
    return RunError(message, hint=hint, exit_code=TRY_AGAIN)


class PausedError(HpcToolkitError):
    """The run paused itself because too many items failed."""
