"""Keep jobs of one shape in the queue while a run has work for them.

``jobs/keep-NAME.json`` of the run says how many jobs, why no more are sent, and whether the jobs
themselves send the others; otherwise ``hpctk keep`` does.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.planning.nodes import Ask, ask_of, lacks
from hpc_toolkit.queue.left import pending_needs
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import share
from hpc_toolkit.slurm.client import SlurmError, scancel
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.slurm.render.file import read_header
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.submit.jobs import (
    FORMAT,
    JobStates,
    RunJob,
    kept,
    known_jobs,
    read_jobs,
    read_kept,
)
from hpc_toolkit.submit.send import queued_jobs, send, without_failed_nodes
from hpc_toolkit.submit.submission import Submission, forecast_left, of_request
from hpc_toolkit.system.quantities import HOUR_S
from hpc_toolkit.system.ranks import noted_name
from hpc_toolkit.system.terminal import note
from hpc_toolkit.worker.pausing import pause_reason

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

COMPLETE = "the run is complete"
CANCELLED = "'hpctk cancel' ended it"
_MOST_FAILED = 3
_FAILED = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED")
_ITEMS_LEFT = 75
_LEAST_S = 300.0
"""Seconds of work that a job of several is worth."""
_EVERY_S = 60.0
_OTHERS = 5
"""How many times less often a job looks whether it has become the one that sends others."""


class Keeper:
    """Submits what is missing of up to ``most`` jobs of one submission, look by look.

    ``job``: the job that looks, if it is one of them; only the one with the lowest id submits, so
    that two at once do not submit one too many. With ``ends`` it submits at most its successor,
    because the others may be about to end too.
    """

    def __init__(
        self,
        submission: Submission,
        run: Run,
        most: int,
        *,
        again: bool,
        job: str = "",
        ends: bool = False,
        **more: object,
    ) -> None:
        assert submission.request is not None
        self._submission, self._run, self._most = submission, run, most
        self._ask = ask_of(*submission.request)
        self._path = run.paths.jobs / _file(submission.name)
        self._record = read_kept(self._path)
        if again or not self._record:
            self._record = {"started": time.time(), "failed": 0, "ended": "", **more}
        self._job, self._ends, self.leads = job, ends, True
        if not job:
            self._write()

    @property
    def ended(self) -> str:
        """Why no more jobs are sent; "" if they are."""
        return str(self._record["ended"])

    def look(self) -> Iterator[str]:
        """Submit the jobs that are missing now, and yield their ids."""
        if self._job and not self._ends and not self._is_first():
            return
        before = dict(self._record)
        self._record["ended"] = self._cancelled or self._reason()
        if not self.ended:
            sent = []
            for job in self._submit():
                sent.append(job)
                yield job.job
            if self._cancelled == CANCELLED:  # after 'hpctk cancel' had looked for jobs
                for job in sent:
                    scancel([job.job], cluster=job.cluster)
            self._record["ended"] = self._record["ended"] or self._cancelled
        if self._record != before:  # several jobs share it
            self._write()

    @property
    def _cancelled(self) -> str:
        return str(read_kept(self._path).get("ended", ""))

    def _write(self) -> None:
        more = {"format": FORMAT, "name": self._submission.name, "jobs": self._most}
        record = {**self._record, **more}
        self._path.parent.mkdir(exist_ok=True)
        share(self._path.parent)
        files.replace_file(self._path, [json.dumps(record).encode() + b"\n"])

    def _reason(self) -> str:
        if self._run.status(forecast=False).complete:
            return COMPLETE
        reasons = filter(None, map(pause_reason, self._run.view.stages.values()))
        if reason := next(reasons, ""):
            return f"the run is paused: {reason}"
        started, name = self._record["started"], self._submission.name
        mine = [job for job in read_jobs(self._run.paths) if job.name == name]
        ids = [job.job for job in mine if job.submitted >= started][-_MOST_FAILED:]
        states = {one.id: one for one in JobStates(self._run.paths).read()} if ids else {}
        last = [states[one] for one in ids if one in states]
        bad = [one for one in last if one.state in _FAILED and one.exit_code != _ITEMS_LEFT]
        if len(bad) == _MOST_FAILED:
            return f"its last {_MOST_FAILED} jobs failed; see 'hpctk logs --job {bad[-1].id}'"
        return ""

    def _queued(self) -> list[JobRecord]:
        """The jobs of this shape in the queue. Raises SlurmError: Slurm does not answer."""
        name = noted_name(self._submission.name)
        queued = [one for one in queued_jobs(known_jobs(self._run.paths)) if not one.foreign]
        return [one.record for one in queued if noted_name(one.record.name) == name]

    def _is_first(self) -> bool:
        try:
            running = [int(one.id) for one in self._queued() if one.running and one.id.isdigit()]
        except SlurmError:
            running = []
        self.leads = bool(running) and str(min(running)) == self._job
        return self.leads

    def _submit(self) -> Iterator[RunJob]:
        try:
            queued = [one for one in self._queued() if not (self._ends and one.id == self._job)]
        except SlurmError as error:
            if self._ends:
                raise
            note(f"Slurm does not answer: {error.message}", "warning")
            return
        # In this order: a job that ends meanwhile has done its work.
        work, submission = jobs_with_work(self._run, self._ask), self._submission
        missing = min(self._most, work) - len(queued)
        if self._ends:
            waiting = sum(one.waiting for one in queued)
            missing = int(waiting < work and len(queued) < self._most)
            after = f"--dependency=afterany:{self._job}"
            submission = replace(submission, options=(*submission.options, after))
        submission = without_failed_nodes(submission) if missing > 0 else submission
        try:
            for job in send(replace(submission, copies=max(0, missing))):
                self._record["failed"] = 0
                yield job
        except HpcToolkitError as error:
            self._record["failed"] += 1
            sys.stderr.write(f"warning: a submission failed: {error.message}\n")
            if self._record["failed"] >= _MOST_FAILED:
                self._record["ended"] = f"{_MOST_FAILED} submissions failed: {error.message}"


def jobs_with_work(run: Run, ask: Ask) -> int:
    """Return how many jobs of ``ask`` have work now.

    That is a unit for each worker and, by the forecast, five minutes for each job, in the stages
    that its workers can hold.
    """
    run.view.poll()
    stages = [one for one in run.view.stages.values() if not one.complete]
    time_s = ask.needs.time_s
    held = [
        (one, units)
        for one in stages
        for needs, _, units in pending_needs(one)
        if not lacks(ask.node, time_s, needs)
    ]
    if not held:  # a worker must add the items that follow others
        after = [one.spec.needs or {} for one in stages if one.spec.after]
        return int(not all(lacks(ask.node, time_s, needs) for needs in after))
    most = math.ceil(sum(units for _, units in held) / ask.workers)
    # Other stages say nothing of one in which no unit has ended.
    known = all(stage.durations.known for stage, _ in held)
    with suppress(HpcToolkitError):
        forecaster = forecast_left(run) if known else None
        if forecaster is not None:
            from hpc_toolkit.planning.plan import choose

            hours = choose(forecaster, ask.node, ask.nodes).node_hours.median
            most = min(most, math.ceil(hours * HOUR_S / (ask.nodes * _LEAST_S)))
    return max(1, most)


def first_jobs(submission: Submission, most: int) -> Iterator[str]:
    """Submit the first of up to ``most`` jobs that from then on submit each other; yield their ids.

    Raises HpcToolkitError: no job can be submitted, and why.
    """
    assert submission.run is not None
    keeper = Keeper(submission, submission.run, most, again=True, by_jobs=True)
    yield from keeper.look()
    if keeper.ended:
        raise HpcToolkitError(f"no jobs are sent: {keeper.ended}")


def send_others(run: Run, script: Path, job: str, *, ends: bool) -> float | None:
    """From ``job``, whose script is ``script``, submit jobs like it that the run has work for.

    Returns the seconds until it should look again; None: this run's jobs do not do so. ``ends``: it
    is about to end, and items are left; at most its successor is submitted.

    Raises HpcToolkitError: the script was not rendered by hpctk, or the cluster is not known;
    SlurmError: Slurm does not answer a job that is about to end.
    """
    header = read_header(script.read_text(encoding="utf-8", errors="replace"), str(script))
    spec = read_spec(header.request)
    record = read_kept(run.paths.jobs / _file(spec.job_name))
    if record.get("ended", "none") or not record.get("by_jobs"):
        return None
    cluster = resolve_cluster(header.cluster).cluster
    submission = of_request(spec, cluster, header.template, run=run, cwd=Path.cwd())
    keeper = Keeper(submission, run, int(record["jobs"]), again=False, job=job, ends=ends)
    for other in keeper.look():
        note(f"submitted job {other}: there is work for it")
    every_s = float(record.get("every_s", _EVERY_S))
    return every_s if keeper.leads else every_s * _OTHERS


def _file(name: str) -> str:
    return f"keep-{file_name(name)[:64]}.json"


def end_keeping(paths: RunPaths) -> int:
    """Let no more jobs be sent for a run; return for how many shapes some would have been."""
    found = [(path, record) for path, record in kept(paths) if not record["ended"]]
    for path, record in found:
        note(f"no more jobs {record['name']} are sent")
        files.replace_file(path, [json.dumps({**record, "ended": CANCELLED}).encode() + b"\n"])
    return len(found)
