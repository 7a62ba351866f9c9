"""The worker: one rank's supervising process, which claims units, journals and sends heartbeats.

It runs no user code. Exit codes: 0, every stage is sealed and has no pending item; 75, items are
left (time is up, a drain, a full disk); 1, the run is paused or its code cannot be loaded.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError, RunError, WorkloadError
from hpc_toolkit.queue.assignment import Assignment, Chooser, Picker
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S, Liveness, WorkerLock, heartbeat_interval_s
from hpc_toolkit.queue.pacing import Pacing
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, PresenceFile
from hpc_toolkit.queue.probes import LIMIT_S, LOCK
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import JournalWriter
from hpc_toolkit.rundir.proof import believed
from hpc_toolkit.system.processes import readable
from hpc_toolkit.system.ranks import RankInfo, host_name
from hpc_toolkit.worker.hosthealth import HostWatch
from hpc_toolkit.worker.passes import Outcome, PassRunner
from hpc_toolkit.worker.passlines import Tally
from hpc_toolkit.worker.safety import FIRST_ITEMS, pause_reason
from hpc_toolkit.worker.slurmliveness import MISSED, SlurmLiveness

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import StageView
    from hpc_toolkit.rundir.layout import Manifest, RunPaths
    from hpc_toolkit.rundir.proof import Proof
    from hpc_toolkit.system.clock import Clock

EXIT_COMPLETE = 0
EXIT_LEFT = 75

DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a worker to finish its item and exit."""

_UPDATE_S = 1.0
_HOLD_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Settings of one worker, fixed at its start."""

    lease_s: float = DEFAULT_LEASE_S
    """Seconds of silence after which a worker counts as dead; locks or Slurm may tell sooner."""
    deadline: float | None = None
    """Epoch seconds by which this worker must have exited; None: no limit."""
    idle_exit_s: float | None = None
    """Exit after this many seconds without work; None: wait indefinitely."""
    grace_s: float = 25.0
    """Seconds that the running item may still take after a signal or a request to drain."""


class Worker:
    """One worker of a run; an instance serves one call of :meth:`run`."""

    def __init__(
        self, paths: RunPaths, manifest: Manifest, options: WorkerOptions, clock: Clock
    ) -> None:
        self._paths = paths
        self._options = options
        self._clock = clock
        rank = RankInfo.from_environ()
        host = host_name()
        self.name = f"{re.sub(r'[^A-Za-z0-9-]', '-', host)}-{os.getpid()}-{os.urandom(3).hex()}"
        self._lock = WorkerLock(paths.worker_lock(self.name))
        workers = len(files.list_names(paths.workers)) // 2
        local = files.is_local(paths.root)
        proof, lease_s = _believed(paths, options.lease_s)
        self._pacing = Pacing(clock, local=local, workers=workers, lease_s=lease_s, seed=self.name)
        self._beat_s = min(heartbeat_interval_s(workers), lease_s / 4)
        self._presence = PresenceFile(
            paths.worker(self.name),
            Presence.here(self.name, rank, interval_s=self._beat_s, at=clock.wall()),
            local=local,
        )
        self._journal = JournalWriter(paths.journal(self.name))
        # If an executor failed to create its log, it would die and its item become a suspect.
        paths.worker_log(self.name).touch()
        for directory in (paths.workers, paths.journals):
            files.sync_directory(directory)
        self._view = RunView(paths, manifest, local=local, limit_s=None if local else LIMIT_S)
        self._view.readers[self.name] = self._journal.reader()
        self._liveness = Liveness(
            paths,
            clock,
            host=host,
            boot=self._presence.presence.boot,
            lease_s=lease_s,
            job=rank.job_id,
            restart=rank.restart,
            cluster=rank.cluster,
            locks_proven=proof.locks,
            probes=self._view.probes,
        )
        self._control = ControlReader(paths)
        self._slurm = SlurmLiveness(paths.root, clock)
        self._picker = Picker(
            self._view,
            self._liveness,
            clock,
            self.name,
            shared=not local,
            place=(rank.rank, rank.world_size),
        )
        self._chooser = Chooser(self._picker, self._pacing, restarted=rank.restart > 0)
        self._wake_fd, self._wake_write = os.pipe()
        self._passes = PassRunner(
            worker=self.name,
            host=host,
            stages={stage.name: stage for stage in manifest.stages},
            view=self._view,
            journal=self._journal,
            log_path=paths.worker_log(self.name),
            clock=clock,
            wake_fd=self._wake_fd,
            tick=self._tick,
        )
        control = self._passes.control
        control.deadline = self._monotonic_deadline()
        self._host_watch = HostWatch(
            self._view, self._liveness, clock, self._presence.presence, control, self._drain
        )
        self._passes.on_streak = self._host_watch.check
        self._passes.ahead = self._picker.ahead
        self._counts = [0, 0, 0]
        self._signals = 0
        self._stage: StageView | None = None
        self._pause = self._reason = ""
        self._judged, self._judge_at = 0, float("-inf")
        self._drain_by = float("inf")
        self._beat_at = self._update_at = clock.monotonic()
        self._idle_since: float | None = None

    def _monotonic_deadline(self) -> float | None:
        if self._options.deadline is None:
            return None
        return self._clock.monotonic() + self._options.deadline - self._clock.wall()

    def run(self) -> int:
        """Work until the run is complete or a stop is requested; return the exit code."""
        self._install_signals()
        try:
            code = self._main()
        except WorkloadError:
            self._leave("the workload cannot be loaded")
            raise
        except OSError as error:
            # Items whose results were not synced run again; nothing more may be written.
            self._passes.close()
            with suppress(OSError):
                self._presence.update(state=DRAINING, note=f"gave up: {error}"[:200])
            raise unwritable(self._paths, error) from error
        self._leave(self._reason)
        return code

    def let_go(self) -> None:
        """Release the lock: a process that exits with it held waits for the file server."""
        # That takes 90 s if an NFSv3 server has just started. The release runs in a thread:
        # on NFS, a thread that waits does not delay the end of the process.
        with suppress(OSError):
            self._view.probes.look(LOCK, self.name, self._lock.release)

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
        deadline = self._passes.control.deadline
        if number == signal.SIGUSR1 and deadline is not None:
            # SIGUSR1 warns minutes before the deadline: the running item has until then.
            grace_s = max(grace_s, deadline - self._clock.monotonic())
        self._drain(f"got {signal.Signals(number).name}", grace_s)
        if self._signals > 1 and number == signal.SIGINT:
            self._passes.control.abort = True

    def _drain(self, reason: str, grace_s: float) -> None:
        self._reason = self._reason or reason
        self._passes.control.stop = True
        self._drain_by = min(self._drain_by, self._clock.monotonic() + grace_s)
        self._update_at = float("-inf")

    def _main(self) -> int:
        while True:
            self._tick()
            if self._passes.control.stop:
                return EXIT_LEFT
            holds = self._host_watch.holds(self._pacing.judge_s)
            assignment = None if holds else self._chooser.next(self._passes.loaded)
            if assignment is not None:
                self._work(assignment)
                continue
            if self._picker.told_complete or (holds and self._view.complete):
                self._tell_complete()
                return EXIT_COMPLETE
            self._wait()

    def _tell_complete(self) -> None:
        """Note completion in ``head``: a hint that saves waiting workers reading all journals."""
        with suppress(OSError):
            for stage in self._view.stages.values():
                stage.log.tell_complete()

    def _work(self, assignment: Assignment | None) -> None:
        self._idle_since = None
        self._pacing.worked()
        while assignment is not None:
            self._stage, self._judged = assignment.stage, 0
            outcome = self._passes.run(assignment)
            tally = self._passes.tally
            for index, number in enumerate((tally.done, tally.failed, tally.deaths)):
                self._counts[index] += number
            self._passes.tally = Tally()
            self._view.poll_journal(self.name)
            if tally.failed:
                self._judge_failures(0)
            if self._pause:
                self._leave(self._pause)
                hint = (
                    "see 'hpctk status'; fix the cause, run 'hpctk retry' and start workers again"
                )
                raise PausedError(self._pause, hint=hint)
            if outcome is Outcome.STOPPED:
                self._drain("no time for another item", 0.0)
            died = outcome is Outcome.DIED and not self._passes.control.stop
            assignment = self._picker.again(assignment) if died else None

    def _judge_failures(self, failed: int) -> None:
        """Stop the unit run, and then the worker, if failures are a reason to pause the run."""
        self._judged = failed
        if self._host_watch.glance(self._pacing.judge_s):
            return
        self._judge_at = self._clock.monotonic() + self._pacing.judge_s
        stage = self._stage
        done = self._counts[0] + self._passes.tally.done
        if stage is None or (stage.spec.max_failures is None and done):
            return
        self._host_watch.read()
        reason = pause_reason(stage)
        # Failures on this host alone are not a reason while other hosts may finish the items.
        if reason and (stage.spec.max_failures is not None or not self._host_watch.check()):
            self._pause = self._reason = f"paused: {reason}"
            self._passes.control.stop = True

    def _wait(self) -> None:
        now = self._clock.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        limit = self._options.idle_exit_s
        if limit is not None and now - self._idle_since >= limit:
            self._drain(f"nothing to do for {limit:g} s", 0.0)
            return
        wait_s = _HOLD_POLL_S if self._passes.control.hold else self._pacing.wait_s
        if readable(self._wake_fd, timeout_s=wait_s):
            os.read(self._wake_fd, 4096)

    def _tick(self) -> None:
        """Do the periodic work: deadline, failures, heartbeat, requests, other workers."""
        now = self._clock.monotonic()
        if now >= self._drain_by:
            self._passes.control.abort = True
        deadline = self._passes.control.deadline
        if deadline is not None and now >= deadline:
            self._drain("the deadline has come", 0.0)
        failed = self._passes.tally.failed
        due = now >= self._judge_at or failed - self._judged >= FIRST_ITEMS
        if failed > self._judged and due:
            # A unit may take long: a run that should pause must not wait for its end.
            self._judge_failures(failed)
        due = now - self._beat_at >= self._beat_s
        if due or (now >= self._update_at and self._progress() != self._shown()):
            self._beat(now, sync=due)
        if self._pacing.watch_due():
            self._read_control()
            self._chooser.died_nearby |= self._picker.notice_deaths(self._pacing.at_most)
            if self._liveness.speaks(self._presence.presence, missed=MISSED):
                self._slurm.ask(self._liveness.silent(missed=MISSED))
            self._pacing.watched(self._picker.living)

    def _progress(self) -> tuple[int, ...]:
        tally = self._passes.tally
        done, failed, deaths = self._counts
        counts = (done + tally.done, failed + tally.failed, deaths)
        return (*counts, self._journal.synced, self._passes.control.stop)

    def _shown(self) -> tuple[int, ...]:
        shown = self._presence.presence
        counts = (shown.done, shown.failed, shown.deaths)
        return (*counts, shown.journal, shown.state == DRAINING)

    def _beat(self, now: float, *, sync: bool) -> None:
        if sync:
            self._beat_at = now  # unsynced updates may reach other hosts 30 s late
        self._update_at = now + _UPDATE_S
        done, failed, deaths, journal, stopping = self._progress()
        self._presence.update(
            sync=sync,
            done=done,
            failed=failed,
            deaths=deaths,
            journal=journal,
            at=round(self._clock.wall(), 3),
            note=self._reason,
            **({"state": DRAINING} if stopping else {}),
        )

    def _read_control(self) -> None:
        requests, notices = self._control.poll()
        for request in requests:
            if self.name in request.workers:
                self._drain(f"asked to drain by {request.name}", self._options.grace_s)
        for notice in notices:
            self._liveness.take_notice(notice)
        self._chooser.died_nearby |= self._host_watch.take(self._control.sick)

    def _leave(self, reason: str) -> None:
        """End the executor, sync the journal, and report in the presence file that we finished."""
        self._passes.close()
        self._slurm.close()
        with suppress(OSError):
            self._journal.sync()
            self._presence.update(
                state=FINISHED,
                note=reason,
                done=self._counts[0],
                failed=self._counts[1],
                journal=self._journal.synced,
            )


def _believed(paths: RunPaths, lease_s: float) -> tuple[Proof, float]:
    """What doctor proved about the filesystem, and a lease no shorter than it measured."""
    proof = believed(paths)
    if lease_s < proof.least_lease_s:
        least, why = f"{proof.least_lease_s:g} s", "changes show late here, as doctor measured"
        sys.stderr.write(f"note: the lease is {least}, not {lease_s:g} s: {why}\n")
    return proof, max(lease_s, proof.least_lease_s)


def start_worker(paths: RunPaths, manifest: Manifest, options: WorkerOptions, clock: Clock) -> int:
    """Run one worker until nothing is left to do; return the exit code.

    Raises:
        HpcToolkitError: the run is paused, its code cannot be loaded, or it cannot be written to.
    """
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
    hint = "fix that and start workers again; nothing is lost"
    gone = files.missing_directory(error)
    if gone is not None:
        message = f"a worker cannot go on: {gone} is gone"
        hint = f"'hpctk doctor {paths.root}' tells what is lost with it"
        if gone.name == "claims":
            hint = f"'hpctk doctor {paths.root} --repair' makes it again; no result is lost"
    failure = RunError(message, hint=hint)
    failure.exit_code = EXIT_LEFT
    return failure


class PausedError(HpcToolkitError):
    """The run paused itself because too many items failed."""
