"""The job that works through a run's items: its ranks are workers of the run's queue."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hpc_toolkit.errors import TRY_AGAIN, HpcToolkitError
from hpc_toolkit.queue.left import Left, what_is_left
from hpc_toolkit.queue.presence import FINISHED, Presence, read_presence
from hpc_toolkit.queue.view import RunView
from hpc_toolkit.rundir.layout import RunPaths, read_manifest
from hpc_toolkit.slurm.batch.job import NO_MPI, Batch, JobEnd, JobError, show
from hpc_toolkit.slurm.batch.staging import NO_STAGING, Staging
from hpc_toolkit.slurm.batch.step import Restarts, check_shown, cpus_per_task
from hpc_toolkit.slurm.client import SlurmError, SlurmFullError
from hpc_toolkit.slurm.containers import NO_CONTAINER, Container
from hpc_toolkit.slurm.controller import job_nodes, set_nodes
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.processes import CUT_SHORT, WARNING_NAMES, Supervisor, shell_code
from hpc_toolkit.system.ranks import RankInfo, host_name

_WATCH_S = 60.0
"""How long workers of other jobs are watched, to see which of them live."""
_HURRY_S = 1.0
"""The same for a job that must end."""
_ASK_AGAIN_S, _FULL_S = 2.0, 10.0
_LINGER_S = 600.0
_STARTING_S = 900.0
_AS_CHILD = f"""trap : TERM {WARNING_NAMES}
"$@"; hpctk_code=$?
"""
_CODE = 'exit "$hpctk_code"\n'
_REFUSALS = 10
"""Consecutive refusals to shrink the job after which :func:`shrink_job` raises."""


@dataclass(kw_only=True)
class WorkJob:
    batch: Batch
    restarts: Restarts
    run: str
    gpus: int = 0
    """GPUs that a task alone on its node must see."""
    options: Sequence[str] = ()
    container: Container = NO_CONTAINER
    python: str = sys.executable
    shrink_every_s: float | None = None
    """How often to look for nodes whose ranks have all left, in seconds; None gives none back."""
    staging: Staging = NO_STAGING
    campaign: bool = False
    """Whether a coordinator runs beside the ranks."""
    one_rank: bool = False
    """Whether one rank, on the first node, has all nodes for the steps of its items."""
    within_s: int = 60
    """Seconds that a node has to start its checks."""
    send_others: Callable[..., float] = lambda *job, **how: math.inf
    """Submits jobs that are kept for the run; returns the seconds until the next call.

    It gets the job's id and name, ``ends``: whether the job is about to end, and ``left``: whether
    it leaves items that it could process.
    """

    def __post_init__(self) -> None:
        self._job = self.batch.job
        self._run = _run_directory(self.run, self.container)
        self._seen = _directories(self._run, self.container)
        self._coordinator: Supervisor | None = None
        self._sending = threading.Lock()

    def main(self) -> NoReturn:
        fit = self._fit_nodes()
        facts = f"run={self._run} interpreter={self.python}"
        self._job.log(f"{facts} {self._job.facts()}")
        # A rank that finds the queue empty leaves, and the others work on. So, other than in a
        # training, neither the first exit (--wait=0) nor a failed rank ends the step.
        step = ["srun", NO_MPI, "--kill-on-bad-exit=0", "--wait=0", "--no-kill", "--label"]
        step += [*cpus_per_task(self._job), *self._placement(fit)]
        step += self.container.srun_options(*self._seen)
        self.batch.start([*step, *self._rank(fit)])
        if self.campaign:
            words = ("campaign", "coordinate", self._run, "--summary")
            coordinator = [sys.executable, "-Pm", "hpc_toolkit", *words]
            self._coordinator = Supervisor(coordinator, self.batch.warn_ranks, log=self._job.log)
        elif self.shrink_every_s is not None and len(fit) > 1:
            self._shrink(self.shrink_every_s)
        threading.Thread(target=self._send_others, daemon=True).start()
        code = self.batch.wait(self._beside)
        self._decide(code)

    def _hpctk(self, *words: str) -> list[str]:
        argv = [self.python, "-Pm", "hpc_toolkit", *words]
        return self.container.inside(argv, *self._seen)

    def _rank(self, fit: Sequence[str]) -> list[str]:
        """The command of each rank, with what it needs on its node."""
        words = self._hpctk("work", self._run, *self.options)
        staging = self.staging
        if not staging.environment:
            return words
        # A rank that finds no copy uses the environment where it is.
        staging.copy(self.batch, self._run, within_s=self.within_s, nodes=fit)
        begin, end = staging.around()
        return ["sh", "-c", f"{begin}{_AS_CHILD}{end}{_CODE}", "sh", *words]

    def _fit_nodes(self) -> list[str]:
        """The nodes that pass the checks. Raises JobEnd or JobError if none does."""
        checks = self.batch.once_per_node(
            "--time=10", *self.container.srun_options(*self._seen), within_s=self.within_s
        )
        checks += self._hpctk("preflight", self._run, "--gpus", str(self.gpus))
        done = subprocess.run(checks, check=False, stdout=subprocess.PIPE)
        report = done.stdout.decode(errors="replace")
        show(report)
        self.batch.receive_all()
        fit = [
            found[1]
            for line in report.splitlines()
            if (found := re.match(r"([^: ]+): ready: ", line))
        ]
        if not fit:
            self.restarts.checks_failed(shell_code(done.returncode), "no node is fit for this job")
        return fit

    def _placement(self, fit: Sequence[str]) -> list[str]:
        """srun's options that leave out the nodes that are not fit."""
        nodes = [f"--nodes={len(fit)}"]
        out = len(self._job.nodes) - len(fit)
        if self.one_rank and not out:
            return ["--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
        if not out:
            return nodes
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE")
        if self.one_rank or not ranks:
            hint = "with --ntasks-per-node, a job continues without such nodes"
            if self.one_rank:
                hint = "the items of a job with --one-rank need all of its nodes"
            raise JobError("a node failed the preflight: see above", hint=hint)
        self._job.log(f"left out: {out} of {len(self._job.nodes)} nodes, see above")
        return [*nodes, f"--ntasks={len(fit) * int(ranks)}", f"--nodelist={','.join(fit)}"]

    def _shrink(self, every_s: float) -> None:
        """Give nodes back to the site when all their ranks have left, while the others work on."""
        paths, rank = RunPaths(Path(self._run)), RankInfo.from_environ()

        def shrink() -> None:
            try:
                for nodes in shrink_job(paths, rank, list(self._job.nodes), every_s=every_s):
                    names = " ".join(nodes)
                    show(f"gave back {names}: their ranks have left\n")
            except (HpcToolkitError, OSError) as error:
                # The job goes on with all of its nodes.
                self._job.log(f"nodes are not released: {error}")

        threading.Thread(target=shrink, daemon=True).start()

    def _send_others(self) -> None:
        pause_s = 0.0
        while pause_s < math.inf:
            time.sleep(pause_s)
            pause_s = _WATCH_S
            with self._sending, suppress(HpcToolkitError, OSError):  # the end reports it too
                pause_s = self.send_others(self._job.id, self._job.name, ends=False)

    def _send_last(self, *, left: bool) -> None:
        """Let other jobs go on when this one ends, as soon as Slurm answers."""
        while not self.batch.ended:
            # For good: a look that this process's end interrupts would keep others waiting.
            if self._sending.acquire(timeout=_ASK_AGAIN_S):
                break
            self.batch.receive_all()
        # A job that has nothing to do holds its nodes no longer than this.
        began = time.monotonic()
        until = math.inf if left else began + _LINGER_S
        while not self.batch.ended:
            try:
                self.send_others(self._job.id, self._job.name, ends=True, left=left)
            except SlurmError as error:
                self._job.log(f"other jobs are not submitted yet: {error.message}")
                full = isinstance(error, SlurmFullError)
                time.sleep(_FULL_S if full else _ASK_AGAIN_S)
                self.batch.receive_all()
                # After a minute without one, another job that goes on submits the successor.
                if time.monotonic() < (began + _WATCH_S if full else until):
                    continue
            except (HpcToolkitError, OSError) as error:
                self._job.log(f"no other job is submitted: {error}")
            return

    def _beside(self) -> float | None:
        if self._coordinator is None:
            return None
        if self.batch.ended:
            # Slurm's SIGTERM reaches the coordinator too, and nobody would need another one.
            self._coordinator.stop()
        return self._coordinator.poll(ranks=self.batch.running)

    def _decide(self, code: int) -> NoReturn:
        """Requeue if items are left, unless a restart would repeat the error ``code``."""
        batch = self.batch
        left = self._what_is_left()
        batch.receive_all()
        try:
            self._end_unless_left(left, code)
        except JobEnd as end:
            if end.code in (0, TRY_AGAIN):
                self._send_last(left=False)
            raise
        try:
            self.restarts.start_again()
        except JobEnd as end:
            again = "no-requeue" not in self._job.options and self.restarts.preempted()
            if end.code == TRY_AGAIN and not again:
                self._send_last(left=True)
            raise

    def _end_unless_left(self, left: Left | None, code: int) -> None:
        """End without a restart if that would do nothing, or repeat an error."""
        batch = self.batch
        self._end_if_done(left, code)
        # Above 128: a rank was killed.
        if not batch.warned and code not in (0, TRY_AGAIN) and code <= 128:
            raise JobEnd(code)
        if left is None or not left.items or left.items != left.elsewhere + left.beyond:
            return
        if not left.elsewhere:
            self.restarts.end_without_requeue("what is left needs more than its workers have")
        if not batch.warned:
            # A start that finds nothing to do would hold the nodes until --idle-exit, repeatedly.
            self.restarts.end_without_requeue("workers of other jobs hold all that is left for it")

    def _what_is_left(self) -> Left | None:
        """None where the run cannot be read."""
        try:
            left = read_left(Path(self._run), _HURRY_S if self.batch.warned else _WATCH_S)
        except (HpcToolkitError, OSError) as error:
            self._job.log(f"items left: unknown ({error})")
            return None
        self._job.log(f"items left: {left.items} ({'complete' if left.complete else 'open'})")
        return left

    def _end_if_done(self, left: Left | None, code: int) -> None:
        if self._coordinator is None:
            if (left is None and code == 0) or (left is not None and left.items == 0):
                raise JobEnd(0)
            return
        if code == 0 or (left is not None and left.complete):
            # The coordinator publishes the last table.
            if self.batch.wait_for(self._coordinator.ended, self._beside) == 0:
                raise JobEnd(0)
        else:
            self._coordinator.stop()
        verdict = self.batch.wait_for(self._coordinator.ended, self._beside)
        # 143 is the answer to stop(); any other code is why the coordinator could not go on.
        if not self.batch.ended and verdict not in (0, CUT_SHORT):
            raise JobEnd(verdict)


def read_left(run: Path, watch_s: float) -> Left:
    """What is left of a run; workers of other jobs are watched for at most ``watch_s`` seconds."""
    view = RunView(RunPaths(run), read_manifest(run))
    view.poll()
    view.poll_claims()
    job = RankInfo.from_environ().job_id
    return what_is_left(view, SystemClock(), job=job, watch_s=watch_s)


def _run_directory(given: str, container: Container) -> str:
    # A name such as '-x' must not be read as an option, nor ':' as srun's word between programs.
    run = f"./{given}" if given.startswith("-") or given == ":" else given
    if not Path(run).is_dir():
        msg = f"no run directory {run} (in {Path.cwd()})"
        raise JobError(msg, hint=f"create it with 'hpctk init {run}'")
    return os.path.realpath(run) if container.words else run


def _directories(run: str, container: Container) -> list[str]:
    """What a container shows its ranks: the run and the code of its items."""
    if not container.words:
        return []
    code: list[str] = []
    with suppress(HpcToolkitError):  # which the preflight reports
        stages = read_manifest(Path(run)).stages
        code = [one for stage in stages for one in stage.workload.path if os.path.isdir(one)]
    check_shown(container, os.getcwd(), run, *code)
    return [run, *code]


def kept_nodes(
    nodes: list[str],
    ranks: Iterable[Presence],
    rank: RankInfo,
    *,
    first: str,
    starting: bool = True,
) -> list[str]:
    """Return the ``nodes`` of the job of ``rank`` to keep, in order.

    The node ``first`` is always kept: the script runs on it. A node is given back when it had
    ranks in this start of the job and all of them reported that they left. A node with silent or
    dead ranks is kept. A node without ranks is kept only while the job is ``starting``; later it
    counts as left out by the preflight.
    """
    mine = [one for one in ranks if (one.job, one.restart) == (rank.job_id, rank.restart)]
    begun = {one.host for one in mine}
    at_work = {one.host for one in mine if one.state != FINISHED}
    return [
        node
        for node in nodes
        if node == first or node in at_work or (starting and node not in begun)
    ]


def shrink_job(
    paths: RunPaths, rank: RankInfo, nodes: list[str], *, every_s: float
) -> Iterator[list[str]]:
    """Give back idle nodes until only the first one is left; yield the nodes each time.

    Otherwise a node would stay allocated until the last rank of the job is done. Called by the
    batch process of a job, on its first node, with the nodes of the job at its start. Nodes that
    the job loses are ignored. While Slurm does not list the job's nodes, none are given back.
    ``every_s`` are the seconds between two checks.

    Raises SlurmError: Slurm refused ten times in a row to shrink the job.
    """
    job = rank.job_id or ""
    refusals = 0
    started = time.monotonic()
    while len(nodes) > 1:
        time.sleep(every_s)
        starting = time.monotonic() - started < _STARTING_S
        found = filter(None, map(read_presence, paths.workers.glob("*.json")))
        kept = kept_nodes(nodes, found, rank, first=host_name(), starting=starting)
        if kept == nodes:
            continue
        try:
            # Slurm refuses a list that contains a node that the job has lost.
            present = job_nodes(job)
        except SlurmError:
            continue
        kept = [node for node in kept if node in present]
        idle = [node for node in present if node not in kept]
        try:
            if idle:
                set_nodes(job, kept)
        except SlurmError:
            # The job may have lost a node after the listing, or slurmdbd may not answer.
            refusals += 1
            if refusals == _REFUSALS:
                raise
            continue
        refusals, nodes = 0, kept
        if idle:
            yield idle
