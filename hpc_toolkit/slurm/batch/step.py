"""Run a job around its step: set-up of its nodes, restarts, and the step of a program."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.slurm import client
from hpc_toolkit.slurm.batch.job import (
    Batch,
    Job,
    JobEnd,
    JobError,
    Signals,
    as_command,
    lost_nodes,
    show,
    this_job,
)
from hpc_toolkit.slurm.batch.staging import Staging
from hpc_toolkit.slurm.client import PATIENCE_S, SlurmError, answer
from hpc_toolkit.slurm.containers import Container
from hpc_toolkit.slurm.controller import parse_config
from hpc_toolkit.system.processes import CUT_SHORT, WARNING_NAMES
from hpc_toolkit.system.quantities import counted

_SRUN_CODES = range(193, 255)
"""Exit codes of srun itself; 255 is its answer to an option that it does not know."""
_KILLED = 137
"""What a lost node leaves of the tasks on the other nodes."""
_REQUEUES_PREEMPTED = (24, 5)
"""The first Slurm that requeues a job which ends within the grace of its preemption (GraceTime),
whatever its exit code."""


def cpus_per_task(job: Job) -> list[str]:
    """srun's option for the CPUs of a task: 22.05 to 23.02 ignore SLURM_CPUS_PER_TASK."""
    if "cpus-per-task" not in job.options:
        return []
    return [f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}"]


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
        state, restarts, preempted, _ = self._scheduled()
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
        lost = code == _KILLED or code in _SRUN_CODES or lost_nodes(self._job)
        if not lost and self._scheduled()[3] in ("", str(len(self._job.nodes))):
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

    def _scheduled(self) -> tuple[str, int, bool, str]:
        """State, restarts, whether it is preempted, and nodes; "" where Slurm does not say."""
        columns = "--Format=State:20,RestartCnt:10,PreemptTime:30,NumNodes:10"
        listed = client.text(["squeue", "--noheader", f"--jobs={self._job.id}", columns])
        rows = [line.split() for line in listed.splitlines()]
        # Several rows: the raw id of an array's last element also stands for the whole array.
        if len(rows) != 1 or len(rows[0]) < 4 or not rows[0][1].isdigit():
            return "", 0, False, ""
        state, restarts, preempted, nodes = rows[0]
        return state, int(restarts), any(letter.isdigit() for letter in preempted), nodes


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


# srun gives the highest code of all tasks. A task that is ended (SIGTERM, 143) because another one
# failed would hide the code that matters, so it exits with 1. Its own SIGTERM may come a moment
# after its program's. srun would take a word ":" for the begin of another program, so each word
# comes with a "=" before it.
_WORDS = """for hpctk_word do shift; set -- "$@" "${hpctk_word#=}"; done
"""
_TASK = """{begin}hpctk_ended=0; trap hpctk_ended=1 TERM; trap {on_warning}
"$@"; hpctk_code=$?
{end}if [ "$hpctk_code" -eq 143 ]; then sleep 1; fi
if [ "$hpctk_code$hpctk_ended" = 1431 ]; then hpctk_code=1; echo "cut short (SIGTERM)" >&2; fi
exit "$hpctk_code"
"""


@dataclass(kw_only=True)
class ProgramJob:
    batch: Batch
    restarts: Restarts
    words: tuple[str, ...]
    gpus: int
    """GPUs that a task alone on its node must see."""
    srun: tuple[str, ...] = ()
    container: Container
    check_inside: str = ""
    """An interpreter in the container that checks the nodes from there; "" checks them outside."""
    run_dir: str | None = None
    """A training's directory, made before its ranks start."""
    alone: bool = False
    """Whether the script is started as it is: it finds its directory in HPCTK_RUN_DIR, and keeps
    working when the time limit is near."""
    staging: Staging
    """What is copied to each node's own disk before the ranks start; the last rank removes it."""
    within_s: int
    """Seconds that a node has to start its checks."""

    def main(self) -> NoReturn:
        check_shown(self.container, os.getcwd())
        self._check_nodes()
        if self.run_dir is not None:
            os.makedirs(self.run_dir, exist_ok=True)
            if self.alone:
                os.environ["HPCTK_RUN_DIR"] = os.path.realpath(self.run_dir)
        beside = self.run_dir or "runs/job"
        code = self.staging.copy(self.batch, beside, within_s=self.within_s)
        if code and self.staging.paths:
            self.restarts.checks_failed(code, "a node could not stage its copies")
        self.batch.job.log(self.batch.job.facts())
        self.batch.start(self._step())
        self._decide(self.batch.wait())

    def _step(self) -> list[str]:
        # One task that fails ends the step, and so does one that ends a minute before the others:
        # in a training they would wait for it.
        argv = ["srun", "--kill-on-bad-exit=1", "--wait=60", "--label"]
        argv += [*cpus_per_task(self.batch.job), *self.srun, *self.container.srun_options()]
        begin, end = self.staging.around()
        on_warning = ('""' if self.alone else ":") + f" {WARNING_NAMES}"
        task = _WORDS + _TASK.format(begin=begin, on_warning=on_warning, end=end)
        words = self.container.inside(list(self.words))
        return [*argv, "sh", "-c", task, "task", *(f"={word}" for word in words)]

    def _check_nodes(self) -> None:
        python = self.check_inside or sys.executable
        check = [python, "-Pm", "hpc_toolkit", "preflight", "--gpus", str(self.gpus)]
        if self.check_inside:
            inside = self.container.srun_options()
            check = [*inside, *self.container.inside(check)]
        argv = self.batch.once_per_node("--time=10", within_s=self.within_s)
        code = self.batch.call([*argv, *check])
        if code:
            self.restarts.checks_failed(code, "a node failed the preflight")

    def _decide(self, code: int) -> NoReturn:
        if self.batch.ended and code == 1:
            raise JobEnd(CUT_SHORT)
        # 75 is the program's way to say that it saved what it has and should be started again.
        # Where a partition gives a preempted job time to end (GraceTime), only tasks get SIGTERM.
        if code and (code == TRY_AGAIN or self.restarts.preempted()):
            self.restarts.start_again()
        if not code and not self.batch.ended:
            self.restarts.finish()
        raise JobEnd(code)
