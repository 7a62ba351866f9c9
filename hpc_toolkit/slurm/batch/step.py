"""The step that does the job's work: its srun, and the wait for its end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections import deque
from typing import TYPE_CHECKING

from hpc_toolkit.slurm.batch.job import JobError
from hpc_toolkit.slurm.client import ASK_S, PATIENCE_S, SlurmError, ask
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.system.processes import WARNING, readable
from hpc_toolkit.system.supervisor import CUT_SHORT, shell_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hpc_toolkit.slurm.batch.job import Job
    from hpc_toolkit.slurm.containers import Container

NO_MPI = "--mpi=none"
"""For steps of hpctk's own programs: srun fails if the library of the site's MpiDefault is missing,
and an item that uses MPI alone would join the step's ranks."""
_KILL_WAIT_S = 30.0


class JobEnd(Exception):  # noqa: N818 - not an error: most jobs end by it
    """The batch process ends here, with an exit code that tells Slurm how the job ended."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Batch:
    """The batch process of a job: what Slurm has asked of the job, and how the job is cleaned up.

    Ranks are sent the signal ``warning`` when the time limit is near.
    The commands of ``teardown``, each as its words, run once at the end, however the job ends.
    """

    def __init__(
        self,
        job: Job,
        signals: Signals,
        *,
        warning: str = WARNING.name[3:],
        teardown: Sequence[Sequence[str]] = (),
    ) -> None:
        self.job = job
        self.warned = job.warned
        """Whether the time limit is near. Ranks that start later know when the job ends."""
        self.ended = False
        """Whether Slurm ends the job: cancelled, preempted, or at its time limit."""
        self.cleanup: list[list[str]] = [as_command(one) for one in teardown]
        """Commands that still have to run at the end."""
        self._signals = signals
        self._warning = warning
        self._leave_at: float | None = None
        self._step: subprocess.Popen[bytes] | None = None

    def once_per_node(self, *options: str, within_s: int = 60) -> list[str]:
        number = len(self.job.nodes)
        # Without --immediate srun waits for a node that is down until the job's time is over.
        argv = ["srun", NO_MPI, f"--immediate={within_s}", "--overlap", f"--nodes={number}"]
        argv += [f"--ntasks={number}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
        # A task alone on its node sees all of the job's GPUs there.
        bound = ["--gpu-bind=none"] if "gpu-bind" in self.job.options else []
        return [*argv, *bound, *options]

    def start(self, argv: Sequence[str]) -> None:
        self._step = subprocess.Popen(list(argv))

    def call(self, argv: Sequence[str]) -> int:
        """Run a command to its end; its exit code, 128 + N for signal N.

        Signals that come meanwhile are acted on afterwards.
        """
        code = subprocess.run(list(argv), check=False).returncode
        self.receive_all()
        return shell_code(code)

    @property
    def running(self) -> bool:
        return self._step is not None and self._step.poll() is None

    def wait(self, beside: Callable[[], float | None] = lambda: None) -> int:
        """Wait for the step, and act on signals meanwhile; the step's exit code.

        ``beside`` is called whenever a child has ended, and after the seconds that it returned.
        """
        code = self.wait_for(lambda: self._step.poll() if self._step else 0, beside)
        self.job.log(f"the step ended with code {code}")
        return code

    def wait_for(
        self, poll: Callable[[], int | None], beside: Callable[[], float | None] = lambda: None
    ) -> int:
        """Wait until ``poll`` returns an exit code, negative for a signal; 128 + N for signal N.

        Raises JobEnd where Slurm ends the job and srun waits for a lost node.
        """
        while (code := poll()) is None:
            self.receive_all()
            waits = [one for one in (beside(), self._until_leaving()) if one is not None]
            if poll() is not None:  # by what happened beside
                continue
            self._receive(self._signals.next(min(waits, default=None)))
            if self._leave_at is not None and time.monotonic() >= self._leave_at:
                self._leave_at = None
                if lost_nodes(self.job, timeout_s=ASK_S):
                    self.job.log("srun still waits for a lost node; exiting")
                    raise JobEnd(CUT_SHORT)
        self.receive_all()
        return shell_code(code)

    def _receive(self, number: int | None) -> None:
        if number == WARNING:
            self._warn()
        elif number == signal.SIGTERM:
            self.ended = True
            self.job.log("Slurm ends this job (SIGTERM)")
            if self.cleanup and self._leave_at is None:
                # Slurm kills this process KillWait after SIGTERM. The srun of Slurm 26.05 may wait
                # longer for the tasks of a lost node, so the teardown starts after three quarters
                # of KillWait; the other ranks keep the rest of it.
                self._leave_at = time.monotonic() + _kill_wait_s() * 3 / 4

    def _until_leaving(self) -> float | None:
        return None if self._leave_at is None else max(0.0, self._leave_at - time.monotonic())

    def _warn(self) -> None:
        self.warned = True
        self.job.log(f"the time limit is near: asking the ranks to finish ({WARNING.name})")
        self.warn_ranks()

    def warn_ranks(self) -> None:
        try:
            ask(["scancel", f"--signal={self._warning}", self.job.id], timeout_s=PATIENCE_S)
        except SlurmError as error:
            self.job.log(f"scancel could not reach the ranks: {error.message}")

    def receive_all(self) -> None:
        while (number := self._signals.next(0)) is not None:
            self._receive(number)

    def clean_up(self) -> None:
        """Run the teardown, once. Failures are logged and change no exit code."""
        commands, self.cleanup = self.cleanup, []
        for argv in commands:
            if self.call(argv):
                words = argv[4:] if argv[0] == "bash" else argv
                self.job.log(f"teardown failed: {shlex.join(words)}")


def as_command(words: Sequence[str]) -> list[str]:
    """The words of a command that may also be one of bash's own, as an argument list."""
    return ["bash", "-c", '"$@"', "bash", *words]


def lost_nodes(job: Job, *, timeout_s: float = PATIENCE_S) -> bool:
    argv = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(job.nodes)}"]
    try:
        return bool(ask([*argv, "--states=down,no_respond"], timeout_s=timeout_s).strip())
    except SlurmError:
        return False


def _kill_wait_s() -> float:
    try:
        found = re.match("[0-9]+", slurm_config().get("KillWait", ""))
    except SlurmError:
        return _KILL_WAIT_S
    return float(found[0]) if found else _KILL_WAIT_S


def cpus_per_task(job: Job) -> list[str]:
    """srun's option for the CPUs of a task: 22.05 to 23.02 ignore SLURM_CPUS_PER_TASK."""
    if "cpus-per-task" not in job.options:
        return []
    return [f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}"]


class Signals:
    """The warning, SIGTERM and SIGCHLD of this process, in the order in which they came.

    The handlers do nothing: Python writes each signal's number into a pipe. A child starts with the
    default actions, since exec resets handlers.
    """

    def __init__(self) -> None:
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        self._seen: deque[int] = deque()
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (WARNING, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def next(self, timeout_s: float | None) -> int | None:
        """The oldest signal that was not returned yet; None after ``timeout_s`` without one."""
        if not self._seen and readable(self._read, timeout_s=timeout_s):
            self._seen.extend(os.read(self._read, 4096))
        return self._seen.popleft() if self._seen else None


def check_shown(container: Container, *directories: str) -> None:
    """Raise JobError unless the container can show these directories."""
    for directory in directories if container.words else ():
        if letters := container.refused(directory):
            msg = f"{container.words[0]} cannot show {directory}: {letters!r} separate paths"
            raise JobError(msg, hint="use a directory without these characters in its path")
