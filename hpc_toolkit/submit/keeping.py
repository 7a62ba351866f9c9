"""Keep jobs of one shape in the queue while a run has work for them.

The run's jobs submit each other, of every shape that is kept for the run; otherwise ``hpctk keep``
submits them. ``submit/jobs.py`` has the records.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.planning.nodes import Ask, ask_of, lacks
from hpc_toolkit.queue.left import pause_reason, pending_needs
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.slurm.client import SlurmError, SlurmFullError, SlurmSilentError, scancel
from hpc_toolkit.slurm.clusters.choice import resolve_cluster
from hpc_toolkit.slurm.render.file import read_header, read_script
from hpc_toolkit.slurm.render.spec import read_spec
from hpc_toolkit.slurm.render.values import file_name
from hpc_toolkit.submit import (
    JobStates,
    Kept,
    RunJob,
    keep_script,
    kept_jobs,
    known_jobs,
    read_job,
    read_jobs,
)
from hpc_toolkit.submit.send import QueuedJob, queued_jobs, send, without_failed_nodes
from hpc_toolkit.submit.submission import Submission, forecast_left, of_request
from hpc_toolkit.system.quantities import HOUR_S
from hpc_toolkit.system.ranks import noted_name
from hpc_toolkit.system.terminal import note

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

COMPLETE = "the run is complete"
CANCELLED = "'hpctk cancel' ended it"
_MOST_FAILED = 3
_FAILED = ("FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED")
_ITEMS_LEFT = 75
_LEAST_S = 300.0
"""Seconds of work that a job of several is worth; at most half of its time limit."""
_EVERY_S = 60.0
_OTHERS = 5
"""How many times less often a job looks whether it has become the one that sends others."""
_REFUSED_S = 600.0
"""Seconds after which a site that takes no more jobs is asked again, if as many are there."""
_NUMBER = re.compile(r"\b(Assoc|QOS)\w*SubmitJob\w*Limit\b")
"""Slurm's words for limits of the number of jobs in the queue, which include jobs of other runs."""


_CROWDED = "as many jobs are in the queue as a limit allows"


class Keeper:
    """Submits what is missing of up to ``most`` jobs of one submission, look by look.

    ``ends``: the id of the job that looks, which is about to end and does not count. ``own``: it is
    one of these jobs, and those that it submits wait for its end. With ``left`` it leaves items,
    and submits at most one successor, because the others may be about to end too.
    """

    def __init__(
        self,
        submission: Submission,
        run: Run,
        most: int,
        *,
        ends: str = "",
        own: bool = False,
        left: bool = False,
    ) -> None:
        assert submission.request is not None
        self._submission, self._run, self._most = submission, run, most
        self._ask = ask_of(*submission.request)
        self._kept = Kept(run.paths.jobs / f"keep-{file_name(submission.name)[:64]}.json")
        self._record = self._kept.read()
        self._ends, self._own, self._left = ends, own, own and left

    def request(self, *, again: bool, **facts: Any) -> None:
        """Record that a user wants these jobs; ``again``: also if that has ended."""
        if again or not self._record:
            began = {"name": self._submission.name, "started": time.time(), "ended": ""}
            facts = {**began, "by_jobs": False, **facts}
        self._kept.request(**facts, jobs=self._most)

    @property
    def ended(self) -> str:
        """Why no more jobs are sent; "" if they are."""
        return str(self._record.get("ended", "its record was removed"))

    @property
    def refused(self) -> str:
        """Why the last submission failed; "" if it did not."""
        return str(self._record.get("refused", ""))

    @property
    def is_crowded(self) -> bool:
        """Whether there were too many jobs for another one, of which some are of this run."""
        others = [one for one in self._record.get("sent", ()) if one != self._ends]
        return self.refused.startswith(_CROWDED) and bool(others)

    def look(self) -> Iterator[str]:
        """Submit the jobs that are missing now, and yield their ids.

        Raises SlurmError: Slurm does not answer, or another process submits these jobs.
        """
        self._record = self._kept.read()
        if not self.ended and ((reason := self._reason()) or self._missing()):
            if not self._kept.take_turn():
                raise SlurmSilentError(f"another process submits jobs {self._submission.name}")
            yield from self._turn(reason)
            self._record = self._kept.read()

    def _turn(self, reason: str) -> Iterator[str]:
        """Submit what is missing, or record the ``reason`` to end, and end the turn."""
        self._record = {**self._kept.read(), "refused": ""}
        sent: list[RunJob] = []
        try:
            if not self.ended and not reason:
                for job in self._submit():
                    sent.append(job)
                    yield job.job
            else:
                if reason == COMPLETE:
                    self._cancel_waiting()
                self._record["ended"] = self.ended or reason
        finally:
            self._record["sent"] = [*self._record.get("sent", ()), *(job.job for job in sent)]
            state = ("started", "failed", "refused", "refused_at", "ended", "sent")
            self._kept.end_turn(**{key: self._record.get(key) for key in state})
        if self._kept.read().get("ended") == CANCELLED:  # after 'hpctk cancel' had looked for jobs
            for job in sent:
                scancel([job.job], cluster=job.cluster)

    def _cancel_waiting(self) -> None:
        """Take jobs back that would find nothing to do, perhaps after hours in the queue."""
        for one in _called(_queue(self._run, self._record["sent"]), self._submission.name):
            if one.record.waiting:
                scancel([one.record.id], cluster=one.cluster)

    def _submit(self) -> Iterator[RunJob]:
        submission = self._submission
        missing = self._missing()  # again: others may have sent some since
        if self._own:
            after = f"--dependency=afterany:{self._ends}"
            submission = replace(submission, options=(*submission.options, after))
        if not missing:
            return
        try:
            for job in send(replace(without_failed_nodes(submission), copies=missing)):
                self._record["failed"] = 0
                yield job
        except SlurmSilentError:
            raise
        except HpcToolkitError as error:
            self._refused(error.message)

    def _refused(self, why: str) -> None:
        """Count a failure, unless a limit of the site is reached, which it is with such jobs."""
        sys.stderr.write(f"warning: a submission failed: {why}\n")
        limit = _NUMBER.search(why)
        if not (self._record["sent"] or limit):
            self._record["failed"] += 1
        if limit:
            why = f"{_CROWDED} ({limit[0]})"
        if self._ends:  # which makes room when it has left
            self._record["sent"] = [*self._record["sent"], self._ends]
        if limit and (self._record["sent"] or not self._record.get("by_jobs")):
            why += ", and it is tried again when one has left"
        self._record |= {"refused": why, "refused_at": time.time()}
        if self._record["failed"] >= _MOST_FAILED:
            self._record["ended"] = f"{_MOST_FAILED} submissions failed: {why}"

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

    def _missing(self) -> int:
        """How many jobs are missing. Raises SlurmError: Slurm does not answer."""
        found = _queue(self._run, self._record["sent"])
        queue = [one for one in found if one.record.id != self._ends]
        mine = [one.record for one in _called(queue, self._submission.name)]
        before, self._record["sent"] = self._record["sent"], [one.id for one in mine]
        full = self._record.get("refused") and mine and len(mine) >= len(before)
        if full and time.time() - self._record["refused_at"] < _REFUSED_S:
            return 0
        # In this order: a job that ends meanwhile has done its work.
        work = jobs_with_work(self._run, self._ask, alone=not queue)
        if self._left:
            waiting = sum(one.waiting for one in mine)
            return int(waiting < work and len(mine) < self._most)
        return max(0, min(self._most, work) - len(mine))


def _queue(run: Run, sent: list[str]) -> list[QueuedJob]:
    """The run's own jobs in the queue. Raises SlurmError: Slurm does not answer."""
    jobs = known_jobs(run.paths)
    named = {one.job for one in jobs}
    # The listing may be older than the jobs of the last turn.
    missed = (read_job(run.paths.jobs / f"{one}.json") for one in sent if one not in named)
    return [one for one in queued_jobs([*jobs, *filter(None, missed)]) if not one.foreign]


def _called(jobs: list[QueuedJob], *names: str) -> list[QueuedJob]:
    noted = {noted_name(name) for name in names}
    return [one for one in jobs if noted_name(one.record.name) in noted]


def jobs_with_work(run: Run, ask: Ask, *, alone: bool = True) -> int:
    """Return how many jobs of ``ask`` have work now.

    That is a unit for each worker and, by the forecast, five minutes or half of the time limit for
    each job, in the stages that its workers can hold. ``alone``: no job of the run is in the queue.
    """
    run.view.poll()
    stages = [one for one in run.view.stages.values() if not one.complete]
    time_s = ask.needs.time_s
    pending = [(one, needs, units) for one in stages for needs, _, units in pending_needs(one)]
    held = [(one, units) for one, needs, units in pending if not lacks(ask.node, time_s, needs)]
    if not held:
        # Any worker adds the items that follow others. One is needed if no other job does it, and
        # nothing is left that has to be done before.
        after = [one.spec.needs or {} for one in stages if one.spec.after]
        fits = not all(lacks(ask.node, time_s, needs) for needs in after)
        return int(alone and not pending and fits)
    most = math.ceil(sum(units for _, units in held) / ask.workers)
    # Other stages say nothing of one in which no unit has ended.
    known = all(stage.durations.known for stage, _ in held)
    with suppress(HpcToolkitError):
        forecaster = forecast_left(run) if known else None
        if forecaster is not None:
            from hpc_toolkit.planning.plan import choose

            hours = choose(forecaster, ask.node, ask.nodes).node_hours.median
            least_s = min(_LEAST_S, time_s / 2) if time_s else _LEAST_S
            most = min(most, math.ceil(hours * HOUR_S / (ask.nodes * least_s)))
    return max(1, most)


def first_jobs(submission: Submission, most: int) -> Iterator[str]:
    """Submit the first of up to ``most`` jobs that from then on submit each other; yield their ids.

    Raises HpcToolkitError: no job can be submitted, and why.
    """
    assert submission.run is not None
    run = submission.run
    keeper = Keeper(submission, run, most)
    copy = keep_script(run.paths, submission.name, submission.text).name
    keeper.request(again=True, by_jobs=True, script=copy, cwd=str(Path.cwd()))
    sent = False
    for job in keeper.look():
        sent = True
        yield job
    if keeper.ended:
        raise HpcToolkitError(f"no jobs are sent: {keeper.ended}")
    if not sent and (why := keeper.refused):
        hint = "submit again when one of them has left" if why.startswith(_CROWDED) else ""
        raise HpcToolkitError(f"no jobs are sent: {why}", hint=hint)
    if not sent:
        note("no job is missing now; the run's other jobs submit some when there is work for them")


def send_others(run: Run, job: str, name: str, *, ends: bool, left: bool = False) -> float:
    """From ``job``, which is called ``name``, submit the jobs that are kept for ``run``.

    Returns the seconds until it should look again. Of the jobs that run, the one with the lowest
    id submits, and one that ``ends``. If items are ``left`` for that one, it submits at most its
    successor.

    Raises SlurmError to a job that ends: it should look again at once.
    """
    shapes = [one for _, one in kept_jobs(run.paths) if one.get("by_jobs") and not one["ended"]]
    every_s = min((float(one.get("every_s", _EVERY_S)) for one in shapes), default=_EVERY_S)
    silent: SlurmError | None = None
    try:
        if not shapes or not (ends or _is_first(run, job, shapes)):
            return every_s * _OTHERS
    except SlurmError:
        return every_s
    for shape in shapes:
        own = ends and noted_name(shape["name"]) == noted_name(name)
        try:
            submission, most = _submission(run, shape), int(shape["jobs"])
            keeper = Keeper(submission, run, most, ends=job if ends else "", own=own, left=left)
            for other in keeper.look():
                note(f"submitted job {other} {shape['name']}: there is work for it")
            # Others that end now may leave nobody who could send one: the first tries again.
            if own and left and keeper.is_crowded and _is_first(run, job, shapes):
                silent = SlurmFullError(keeper.refused)
        except SlurmError as error:
            silent = error
        except (HpcToolkitError, OSError) as error:
            note(f"no job {shape['name']} is submitted: {error}", "warning")
    if silent is not None and ends:
        raise silent
    return every_s


def _is_first(run: Run, job: str, shapes: list[dict[str, Any]]) -> bool:
    """Whether no kept job with a lower id runs. Raises SlurmError: Slurm does not answer."""
    queue = _queue(run, [one for shape in shapes for one in shape["sent"]])
    kept = [one.record for one in _called(queue, *(shape["name"] for shape in shapes))]
    running = [int(one.id) for one in kept if one.running and one.id.isdigit()]
    return not running or str(min(running)) == job


def _submission(run: Run, record: dict[str, Any]) -> Submission:
    """The submission of a kept shape, from the run's copy of its script."""
    path = run.paths.jobs / record["script"]
    header, cwd = read_header(read_script(path), str(path)), Path(record["cwd"])
    cluster = resolve_cluster(header.cluster).cluster
    found = of_request(read_spec(header.request), cluster, header.template, run=run, cwd=cwd)
    elsewhere = () if found.cwd != cwd or cwd == Path.cwd() else (f"--chdir={cwd}",)
    return replace(found, options=(*found.options, *elsewhere))


def end_keeping(paths: RunPaths) -> int:
    """Let no more jobs be sent for a run; return for how many shapes some would have been."""
    found = [(one, record) for one, record in kept_jobs(paths) if not record["ended"]]
    for one, record in found:
        note(f"no more jobs {record['name']} are sent")
        one.request(ended=CANCELLED)
    return len(found)
