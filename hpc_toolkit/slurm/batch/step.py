"""The batch process of a job: its step, Slurm's signals, and whether the job starts again."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.slurm import client
from hpc_toolkit.slurm.batch.job import Job, JobError, show, this_job
from hpc_toolkit.slurm.client import ASK_S, PATIENCE_S, SlurmError, answer, ask
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.system.processes import CUT_SHORT, WARNING_NAME, WARNINGS, readable, shell_code
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from hpc_toolkit.slurm.containers import Container

NO_MPI = "--mpi=none"
"""For steps of hpctk's own programs: srun fails if the library of the site's MpiDefault is missing,
and an item that uses MPI alone would join the step's ranks."""
_KILL_WAIT_S = 30.0
_SRUN_CODES = range(193, 255)
"""Exit codes of srun itself; 255 is its answer to an option that it does not know."""
_KILLED = 137
"""What a lost node leaves of the tasks on the other nodes."""
_REQUEUES_PREEMPTED = (24, 5)
"""The first Slurm that requeues a job which ends within the grace of its preemption (GraceTime),
whatever its exit code."""


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
        warning: str = WARNING_NAME,
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

    def once_per_node(
        self, *options: str, within_s: int = 60, nodes: Sequence[str] = ()
    ) -> list[str]:
        """The words before those of a command that runs once on each of ``nodes``, or on all."""
        number = len(nodes or self.job.nodes)
        # Without --immediate srun waits for a node that is down until the job's time is over.
        argv = ["srun", NO_MPI, f"--immediate={within_s}", "--overlap", f"--nodes={number}"]
        argv += [f"--ntasks={number}", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--wait=0"]
        # A task alone on its node sees all of the job's GPUs there.
        bound = ["--gpu-bind=none"] if "gpu-bind" in self.job.options else []
        bound += [f"--nodelist={','.join(nodes)}"] if nodes else []
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
            leaving = self._leave_at and max(0.0, self._leave_at - time.monotonic())
            waits = [one for one in (beside(), leaving) if one is not None]
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
        if number in WARNINGS:
            self.warned, name = True, signal.Signals(number).name
            self.job.log(f"the time limit is near: asking the ranks to finish ({name})")
            self.warn_ranks()
        elif number == signal.SIGTERM:
            self.ended = True
            self.job.log("Slurm ends this job (SIGTERM)")
            if self.cleanup and self._leave_at is None:
                # Slurm kills this process KillWait after SIGTERM. The srun of Slurm 26.05 may wait
                # longer for the tasks of a lost node, so the teardown starts after three quarters
                # of KillWait; the other ranks keep the rest of it.
                self._leave_at = time.monotonic() + _kill_wait_s() * 3 / 4

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
    return bool(client.text([*argv, "--states=down,no_respond"], timeout_s=timeout_s).strip())


def _kill_wait_s() -> float:
    config = client.text(["scontrol", "show", "config"], timeout_s=ASK_S)
    found = re.match("[0-9]+", parse_config(config).get("KillWait", ""))
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
        for number in (*WARNINGS, signal.SIGTERM, signal.SIGCHLD):
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


class Restarts:
    """How a job may start again: ``most`` times; never with ``#SBATCH --no-requeue``."""

    def __init__(self, batch: Batch, *, most: int) -> None:
        self._batch = batch
        self._job = batch.job
        self._requeue = "no-requeue" not in batch.job.options
        self._most = most

    def start_again(self) -> NoReturn:
        """Requeue the job: raise JobEnd with 0 if it starts again, with 75 if it may not."""
        if not self._requeue:
            self.end_without_requeue("--no-requeue")
        self._batch.clean_up()
        self._batch.receive_all()
        if self._batch.ended:
            raise JobEnd(TRY_AGAIN)
        # The count is the scheduler's: a job that this one submits inherits SLURM_RESTART_COUNT.
        state, restarts, preempted = self._scheduled()
        again = f"'scontrol requeue {self._job.id}' starts it again"
        if not state:
            self.end_without_requeue(f"Slurm does not report its state; {again}")
        if state != "RUNNING":
            # A cancelled job must stay cancelled, and scontrol would requeue it too.
            self.end_without_requeue(f"the job is {state}")
        if preempted and slurm_requeues():
            # Slurm 24.11 would requeue the job twice: now, and again when the next start ends.
            self.end_without_requeue("Slurm itself requeues a preempted job")
        if restarts >= self._most:
            self.end_without_requeue(
                f"{counted(restarts, 'restart')}, and --max-restarts is {self._most}"
            )
        self._job.log("requeueing")
        done = _scontrol("requeue", self._job.id)
        self._batch.receive_all()
        # Requeueing ends this process by SIGTERM, and may end scontrol before it has answered.
        if done or self._batch.ended:
            raise JobEnd(0)
        self.end_without_requeue(f"Slurm refused or did not answer; {again}")

    def end_without_requeue(self, reason: str) -> NoReturn:
        self._job.log(f"not requeued: {reason}")
        raise JobEnd(TRY_AGAIN)

    def checks_failed(self, code: int, what: str) -> NoReturn:
        """End a job after checks that ended with ``code``; it starts again if a node was lost.

        Raises:
            JobError: no node was lost, so the checks would fail again.
            JobEnd: the job has lost a node, which Slurm leaves out of the next start.
        """
        # Where a node is down or silent already, srun starts nothing and ends with 1. A node that
        # was down for a moment is idle again, but Slurm has removed it from the job.
        lost = code == _KILLED or code in _SRUN_CODES or lost_nodes(self._job) or self._shrunk()
        if not lost:
            raise JobError(f"{what}: see above")
        self._job.log("a node was lost before the preflight was complete: see above")
        self.start_again()

    def preempted(self) -> bool:
        return self._scheduled()[2]

    def finish(self) -> None:
        """Keep Slurm from running a finished program again after a preemption.

        24.05 and newer would because the job was preempted, and 24.11 also because an earlier start
        outlived the grace of its preemption.
        """
        earlier = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
        if not (self._requeue and (earlier or self.preempted()) and slurm_requeues()):
            return
        if not _scontrol("update", f"JobId={self._job.id}", "Requeue=0"):
            self._job.log("Slurm may restart this job although it has finished")

    def _scheduled(self) -> tuple[str, int, bool]:
        """State, restarts, and whether it is preempted; state "" where Slurm does not say."""
        columns = "--Format=State:20,RestartCnt:10,PreemptTime:30"
        listed = client.text(["squeue", "--noheader", f"--jobs={self._job.id}", columns])
        rows = [line.split() for line in listed.splitlines()]
        # Several rows: the raw id of an array's last element also stands for the whole array.
        if len(rows) != 1 or len(rows[0]) < 3 or not rows[0][1].isdigit():
            return "", 0, False
        words = rows[0]
        return words[0], int(words[1]), any(letter.isdigit() for letter in words[2])

    def _shrunk(self) -> bool:
        argv = ["squeue", "--noheader", f"--jobs={self._job.id}", "--format=%D"]
        nodes = client.text(argv).split()
        return bool(nodes) and nodes[0] != str(len(self._job.nodes))


def slurm_requeues() -> bool:
    config = parse_config(client.text(["scontrol", "show", "config"]))
    version = re.match(r"([0-9]+)\.([0-9]+)", config.get("SLURM_VERSION", ""))
    if version is None or (int(version[1]), int(version[2])) < _REQUEUES_PREEMPTED:
        return False
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    shown = client.text(["scontrol", "--oneliner", "show", "partition", partition])
    return re.search(r" PreemptMode=[A-Z,]*REQUEUE", shown) is not None


def _scontrol(*words: str) -> bool:
    argv: Sequence[str] = ["scontrol", *words]
    try:
        done = answer(argv, timeout_s=PATIENCE_S)
    except SlurmError as error:
        show(f"{error.message}\n")
        return False
    show(done.stderr)
    return done.code == 0


def run_batch(
    script: Path,
    body: Callable[[Batch, Restarts], object],
    *,
    array_offset: int,
    max_restarts: int,
    warning: str,
    node_setup: Sequence[str],
    teardown: Sequence[str],
) -> int:
    """Do what a job does around its step; the exit code of the job.

    ``body`` ends by raising JobEnd. ``warning``: the signal that warns ranks of the time limit.
    Commands are plain words; those of ``teardown`` run however the job ends.

    Raises JobError if this is not a Slurm job or cannot run here, SlurmError if Slurm is silent.
    """
    signals = Signals()
    commands = [shlex.split(line) for line in teardown]
    try:
        job = this_job(script, array_offset=array_offset)
    except BaseException:
        for command in commands:
            subprocess.run(as_command(command), check=False)
        raise
    batch = Batch(job, signals, warning=warning, teardown=commands)
    restarts = Restarts(batch, most=max_restarts)
    try:
        _set_up_nodes(batch, restarts, node_setup)
        body(batch, restarts)
    except JobEnd as end:
        return end.code
    finally:
        batch.clean_up()
    return 0


def _set_up_nodes(batch: Batch, restarts: Restarts, lines: Sequence[str]) -> None:
    if not lines:
        return
    commands = " && ".join(shlex.join(shlex.split(line)) for line in lines)
    text = f'{commands} || {{ echo "failed on $SLURMD_NODENAME" >&2; exit 1; }}'
    code = batch.call([*batch.once_per_node("--label"), "bash", "-c", text])
    if code:
        restarts.checks_failed(code, "the setup of a node failed")
