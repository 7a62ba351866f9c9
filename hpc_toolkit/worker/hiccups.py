"""A worker that outlives errors of its filesystem: its executor stays, its name does not.

Nothing may be written to a journal after an error (rule R4), so the worker's name ends there. The
process waits, with the model loaded, until the filesystem takes the files of another name. The new
name first writes what the journal of the former one lacks, then shows that the former one has
finished, and only then claims: by the next generation, like every other worker (rule R3).
"""

from __future__ import annotations

import errno
import math
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from hpc_toolkit.errors import TRANSIENT, TRY_AGAIN, RunError
from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.presence import LOCK, WAITING
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import refuse_removed
from hpc_toolkit.system.processes import STOP_SIGNALS, WARNINGS, readable
from hpc_toolkit.worker.membership import Drain, new_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpc_toolkit.queue.presence import Probes
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.system.clock import Clock
    from hpc_toolkit.worker.membership import Membership
    from hpc_toolkit.worker.unitruns import UnitRunner

FIRST_S, GROWTH, LONGEST_S = 0.05, 1.5, 30.0
"""The first pause before another name is tried, the factor of the next, and the longest one."""
_CALM_S = 60.0
"""A name that lived this long ends a run of errors too: an item may take hours."""
_SILENT_S = 2.0
"""Seconds of a run of errors after which a line about it is printed."""
_LOOK_S = 1.0
_MOST_NAMES = 9999


class Continuity:
    """What a worker process keeps from one of its names to the next."""

    def __init__(
        self,
        paths: RunPaths,
        clock: Clock,
        *,
        deadline: float | None,
        grace_s: float,
        idle_exit_s: float | None,
    ) -> None:
        """The options are those of :class:`hpc_toolkit.worker.worker.WorkerOptions`."""
        self._paths, self._clock = paths, clock
        self._grace_s, self._idle_exit_s = grace_s, idle_exit_s
        self.drain = Drain(clock, deadline)
        self.names: list[str] = []
        """All names of this process; requests to one of them are for this worker."""
        self.held: tuple[str, str] | None = None
        """Stage and unit that the former name held."""
        self.wake_fd, self._wake_write = os.pipe()
        self._members: list[Membership] = []  # the last is the present one, the others have to end
        self._runner: UnitRunner | None = None
        self._unwritten: list[bytes] = []
        """Journal lines that may be in no journal that is synced."""
        self._carried = 0
        """Bytes of the present journal that former names left."""
        self._joined_at = math.inf
        """When the present name joined the run; infinite: it did not."""
        self._pause_s = 0.0
        self._since: float | None = None
        """When the run of errors began; None: there is none."""
        self._printed = False
        self._signals = 0
        self._control, self._control_at = ControlReader(paths), 0.0

        self.wrote: list[str] = []
        """Former names whose journals have lines that no later journal repeats."""
        self._pressed = False
        """Whether the last try for results in memory was made."""

    def listen(self) -> None:
        """Take the signals that request an exit."""
        for fd in (self.wake_fd, self._wake_write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for sig in STOP_SIGNALS:
            signal.signal(sig, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals += 1
        grace_s = self._grace_s
        if number in WARNINGS and self.drain.deadline is not None:
            # It comes minutes before the deadline: the running item has until then.
            grace_s = max(grace_s, self.drain.deadline - self._clock.monotonic())
        if self._signals > 1 and number == signal.SIGINT:
            grace_s = 0.0
        self.drain.request(f"got {signal.Signals(number).name}", grace_s)

    def join(self, make: Callable[[str], Membership]) -> Membership:
        """Join the run under a new name, which ends the former ones. Raises OSError."""
        first = self.names[0] if self.names else new_name()
        # Names of a process sort in their order: of two equal lines, the older one counts (R11).
        name = f"{first}.{len(self.names) + 1:04}" if self.names else first
        self.names.append(name)
        member = make(name)
        self._members.append(member)
        if self._unwritten:
            lines, self._unwritten = b"".join(self._unwritten), []
            member.journal.append(lines)  # from here on, its ``unsynced`` has them
            member.journal.sync()
        self._carried, self._joined_at = member.journal.synced, self._clock.monotonic()
        while self._members[1:]:
            self._members[0].end(f"goes on as {name} after an error of the filesystem")
            self._members.pop(0).lock.close()
        return member

    def keep(self, runner: UnitRunner) -> None:
        """Give a new name's runner the executor of the former one."""
        if self._runner is not None:
            runner.adopt(self._runner)
        self._runner = runner

    def wait(self, error: OSError, probes: Probes | None) -> None:
        """End the present name, and pause. Raises RunError: the worker must exit."""
        self._note_progress()
        self._part(f"{WAITING}{error.strerror}", probes)
        if error.errno not in TRANSIENT or len(self.names) >= _MOST_NAMES:
            self._give_up(error)
        self._pause_s = min(max(FIRST_S, self._pause_s * GROWTH), LONGEST_S)
        end = self._clock.monotonic() + self._pause_s
        while True:
            if self._look(error):
                return
            left_s = min(end - self._clock.monotonic(), _LOOK_S)
            if left_s <= 0:
                return
            if self.drain.requested:  # the grace period may be shorter than the pause
                end = min(end, self._clock.monotonic() + _LOOK_S)
            if readable(self.wake_fd, timeout_s=left_s):
                os.read(self.wake_fd, 4096)

    def let_go(self, probes: Probes | None = None) -> None:
        """Release the locks: a process that exits with one held waits for the file server."""
        # That takes 90 s if an NFSv3 server has just started. The release runs in a thread:
        # on NFS, a thread that waits does not delay the end of the process.
        for member in self._members:
            _free(member, probes)

    def _note_progress(self) -> None:
        """Let the pauses grow until a result was committed, however many units are tried."""
        now = self._clock.monotonic()
        joined = self._joined_at < math.inf
        wrote = joined and self._members[-1].journal.synced > self._carried
        if joined and self._members[-1].journal.size:
            self.wrote.append(self._members[-1].name)
        if wrote or now - self._joined_at > _CALM_S:
            self._pause_s, self._since, self._printed = 0.0, None, False
        if self._since is None:
            self._since = now
        self._joined_at = math.inf

    def _part(self, note: str, probes: Probes | None) -> None:
        """End what the present name could still write or claim."""
        if self._runner is not None:
            self._runner.stop()
            self.held = self._runner.held or self.held
        for member in self._members:
            self._unwritten += member.journal.unsynced
            member.journal.unsynced.clear()
            with suppress(OSError):
                member.journal.close()
            # Before the lock is free: a worker that drains is not suspected to have died. If that
            # cannot be shown now, the next pause may do so; else only the lease ends this name.
            if member.pause(note):
                _free(member, probes)

    def _look(self, error: OSError) -> bool:
        """Print what the worker waits for, and exit if that was requested; True: try at once."""
        now = self._clock.monotonic()
        assert self._since is not None
        waited_s = now - self._since
        if waited_s > _SILENT_S and not self._printed:
            self._printed = True
            told = f"{self.names[0]}: waiting for {self._paths.root}: {error.strerror}\n"
            with suppress(OSError):  # it may be a file on the same disk
                sys.stderr.write(told)
        if now >= self._control_at:  # many workers wait at once, and each lists the directory
            self._control_at = now + max(_LOOK_S, self._pause_s / 4)
            with suppress(OSError):
                for request in self._control.poll()[0]:
                    if not request.workers.isdisjoint(self.names):
                        self.drain.request(f"asked to drain by {request.name}", self._grace_s)
        self.drain.check_deadline()
        limit = self._idle_exit_s
        if limit is not None and waited_s >= limit:
            self.drain.request(f"nothing to do for {limit:g} s", 0.0)
        # Results in memory are worth the grace period.
        has_results = self._unwritten or (self._runner is not None and self._runner.is_answered)
        if not self.drain.requested or (has_results and not self.drain.interrupts):
            return False
        if not has_results or self._pressed:
            self._give_up(error)
        self._pressed = True  # the filesystem may have answered since this pause began
        return True

    def _give_up(self, error: OSError) -> NoReturn:
        # Items whose results were not synced run again; nothing more may be written.
        if self._runner is not None:
            self._runner.close()
        for member in self._members:
            member.pause(f"gave up: {error}")
        raise unwritable(self._paths, error) from error


def _free(member: Membership, probes: Probes | None) -> None:
    with suppress(OSError):
        if probes is None:
            member.lock.close()
        else:
            probes.look(LOCK, member.name, member.lock.close)


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
        if paths.root.parent.is_dir():  # else its filesystem may be mounted again
            refuse_removed(paths.root)
        message = f"the worker stops: {gone} is missing"
        hint = f"'hpctk doctor {paths.root}' shows what else is lost"
        if gone.name == "claims":
            hint = f"'hpctk doctor {paths.root} --repair' rebuilds it; no result is lost"
    return RunError(message, hint=hint, exit_code=TRY_AGAIN)
