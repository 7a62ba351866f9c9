"""The job that runs one program on all of its ranks: a command or a training."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

from hpc_toolkit.errors import TRY_AGAIN
from hpc_toolkit.slurm.batch.staging import NO_STAGING, Staging
from hpc_toolkit.slurm.batch.step import Batch, JobEnd, Restarts, check_shown, cpus_per_task
from hpc_toolkit.slurm.containers import NO_CONTAINER, Container
from hpc_toolkit.system.processes import CUT_SHORT, WARNING_NAMES

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
    gpus: int = 0
    """GPUs that a task alone on its node must see."""
    srun: tuple[str, ...] = ()
    container: Container = NO_CONTAINER
    check_inside: str = ""
    """An interpreter in the container that checks the nodes from there; "" checks them outside."""
    run_dir: str | None = None
    """A training's directory, made before its ranks start."""
    alone: bool = False
    """Whether the script is started as it is: it finds its directory in HPCTK_RUN_DIR, and keeps
    working when the time limit is near."""
    staging: Staging = NO_STAGING
    """What is copied to each node's own disk before the ranks start; the last rank removes it."""
    within_s: int = 60
    """Seconds that a node has to start its checks."""

    def main(self) -> NoReturn:
        check_shown(self.container, os.getcwd())
        self._check_nodes()
        self._make_directory()
        self._stage()
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

    def _make_directory(self) -> None:
        if self.run_dir is None:
            return
        os.makedirs(self.run_dir, exist_ok=True)
        if self.alone:
            os.environ["HPCTK_RUN_DIR"] = os.path.realpath(self.run_dir)

    def _stage(self) -> None:
        staging, beside = self.staging, self.run_dir or "runs/job"
        code = staging.copy(self.batch, beside, within_s=self.within_s)
        if code and staging.paths:
            self.restarts.checks_failed(code, "a node could not stage its copies")

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
