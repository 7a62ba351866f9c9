"""The batch process of a job, and whether the job starts again: one line of log per decision."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING, NoReturn

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.slurm.batch.job import JobError, show, this_job
from hpc_toolkit.slurm.batch.step import Batch, JobEnd, Signals, as_command, lost_nodes
from hpc_toolkit.slurm.client import PATIENCE_S, SlurmError, answer, ask
from hpc_toolkit.slurm.controller import slurm_config
from hpc_toolkit.system.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_SRUN_CODES = range(193, 255)
"""Exit codes of srun itself; 255 is its answer to an option that it does not know."""
_KILLED = 137
"""What a lost node leaves of the tasks on the other nodes."""
_REQUEUES_PREEMPTED = (24, 5)
"""The first Slurm that requeues a job which ends within the grace of its preemption (GraceTime),
whatever its exit code."""


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
        argv = ["squeue", "--noheader", f"--jobs={self._job.id}"]
        try:
            answer = ask(
                [*argv, "--Format=State:20,RestartCnt:10,PreemptTime:30"], timeout_s=PATIENCE_S
            )
        except SlurmError:
            return "", 0, False
        rows = [line.split() for line in answer.splitlines()]
        # Several rows: the raw id of an array's last element also stands for the whole array.
        if len(rows) != 1 or len(rows[0]) < 3 or not rows[0][1].isdigit():
            return "", 0, False
        words = rows[0]
        return words[0], int(words[1]), any(letter.isdigit() for letter in words[2])

    def _shrunk(self) -> bool:
        argv = ["squeue", "--noheader", f"--jobs={self._job.id}", "--format=%D"]
        try:
            nodes = ask(argv, timeout_s=PATIENCE_S).split()
        except SlurmError:
            return False
        return bool(nodes) and nodes[0] != str(len(self._job.nodes))


def slurm_requeues() -> bool:
    partition = os.environ.get("SLURM_JOB_PARTITION", "")
    try:
        config = slurm_config(timeout_s=PATIENCE_S)
        version = re.match(r"([0-9]+)\.([0-9]+)", config.get("SLURM_VERSION", ""))
        if version is None or (int(version[1]), int(version[2])) < _REQUEUES_PREEMPTED:
            return False
        argv = ["scontrol", "--oneliner", "show", "partition", partition]
        shown = ask(argv, timeout_s=PATIENCE_S)
    except SlurmError:
        return False
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
