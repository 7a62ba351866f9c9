"""Why a run makes no progress, as far as its jobs show: squeue(1), JOB REASON CODES."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.results.progress import NO_WORKER, OPEN
from hpc_toolkit.results.status import Beside, Status
from hpc_toolkit.rundir.files import last_lines
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.rundir.trust import believed
from hpc_toolkit.slurm.records import JobRecord
from hpc_toolkit.submit import log_files, read_jobs

if TYPE_CHECKING:
    from hpc_toolkit.run import Run

_STUCK = {
    "AccountNotAllowed": "its account may not use this partition: submit with another --account",
    "BadConstraints": "no node can give what it requests: cancel it and request less",
    "DependencyNeverSatisfied": "what it waits for can never happen any more: cancel it",
    "InvalidAccount": "its account is not valid: cancel it and submit with --account",
    "InvalidQOS": "its quality of service is not valid: cancel it and submit with --qos",
    "Invalid.*": "Slurm cannot run it as it is: cancel it, see 'scontrol show job {id}'",
    "JobHeldAdmin": "an administrator holds it: ask them why",
    "JobHeldUser": "it is held: 'scontrol release {id}' lets it go",
    "JobHoldMaxRequeue": "requeued too often and held: 'scontrol release {id}' lets it go",
    "MaxMemPerLimit": "it requests more memory than the site allows: cancel it, use less --mem",
    "PartitionConfig": "its partition does not allow its request: cancel it, change --partition",
    "PartitionNodeLimit": "MinNodes or MaxNodes of its partition: cancel it, change --nodes",
    "PartitionTimeLimit": "it wants more time than its partition gives: cancel it, request less",
    "QOSNotAllowed": "its quality of service is not allowed here: submit with another --qos",
    r"(QOS|Assoc)Max\w+Per(Job|Node).*|QOSMin.*": "its account or quality of service allows no such"
    " job: cancel it, change its size",
    "Reservation[DI].*": "its reservation is gone: cancel it and submit without one",
    "REQUEUE_HOLD": "it was requeued and is held: 'scontrol release {id}' lets it go",
    "RESV_DEL_HOLD": "its reservation is gone and it is held: submit without a reservation",
    "SPECIAL_EXIT": "it ended in a way that needs a look, and is held: 'scontrol release {id}'",
}
"""Reasons and states of jobs that start only after a person acts, as patterns."""
_WAITS = {
    "BeginTime": "its begin time has not come; a requeued job waits about two minutes",
    "Cleaning": "Slurm still cleans up after its last run: wait",
    "Dependency": "it waits for another job to end",
    "JobArrayTaskLimit": "as many elements of its array run as its '%' allows",
    "Licenses": "the licenses that it needs are in use: wait",
    "NodeDown": "a node that it needs is down: wait, or submit without a nodelist",
    "None": "Slurm has not looked at it yet",
    "PartitionDown": "its partition takes no jobs now: submit with another --partition, or wait",
    "PartitionInactive": "its partition is inactive: submit with another --partition",
    "Priority": "other jobs have a higher priority",
    "Prolog": "its nodes are being prepared",
    "Reservation": "it waits for its reservation to begin",
    "Resources": "the nodes that it needs are busy",
    ".*(launch[_ ]failed|LaunchFailure).*": "its script could not be started: see 'scontrol show"
    " job {id}', then release it",
    "(ReqNode|Nodes).*": "a node that it needs is down, drained or reserved: wait, request others",
    "BurstBuffer.*": "it waits for a burst buffer: see 'scontrol show job {id}'",
    "(NonZeroE|RaisedSig|TimeLimit|OutOfM).*": "its last run failed: see 'hpctk logs --job {id}'",
    "QOS.*": "its quality of service allows no more now: wait, or see 'sacctmgr show qos'",
    "(Assoc|AccountingP).*": "its account has used up what it may: wait, or use another --account",
    "Max.*": "a limit of the site is reached: wait for own jobs to end",
}
_SUSPENDED = ("SUSPENDED", "STOPPED")


def beside_of(run: Run, records: Callable[[], list[JobRecord]]) -> Beside:
    """What a status shows of the run's jobs and its filesystem."""
    return Beside(
        doctor=believed(run.paths).said,
        reason=lambda now: why(now, records()),
    )


def why(now: Status, jobs: Sequence[JobRecord]) -> str:
    """Why there is no progress; without workers, what a job of the run waits for and what helps."""
    suspended = [job.id for job in jobs if job.state in _SUSPENDED]
    goes_on = not now.complete and now.halt != OPEN
    if suspended and goes_on and not any(job.state == "RUNNING" for job in jobs):
        return f"Slurm has suspended job {suspended[0]}: it continues when Slurm resumes it"
    if now.halt != NO_WORKER:
        return now.reason
    for job in jobs:
        if job.running:
            return (
                f"no worker is alive, and job {job.id} has nodes: its ranks are starting, or "
                f"'hpctk logs --job {job.id}' tells why not"
            )
    waiting = [job for job in jobs if job.waiting]
    if not waiting and jobs and jobs[-1].state == "PREEMPTED":
        start = "'hpctk submit' continues the run"
        return f"no worker is alive: job {jobs[-1].id} was preempted and does not restart; {start}"
    if not waiting:
        return _after_end(now, jobs[-1]) if jobs else now.reason
    # Prefer a job that may start without help.
    job = min(waiting, key=is_stuck)
    return f"no worker is alive, and job {job.id} waits: {why_waiting(job)}"


def _after_end(now: Status, job: JobRecord) -> str:
    """Why there are no workers: if their last job failed, how, and the last lines of its log."""
    if not job.ended or job.state == "COMPLETED":
        return now.reason
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    paths, said = RunPaths(Path(now.run)), ""
    with suppress(OSError):  # the log may be on another machine
        if any(one.job == job.id.partition("_")[0] for one in read_jobs(paths)):
            logs = sorted(log_files(paths, job.id), key=lambda path: path.stat().st_mtime)
            lines = [line.strip()[:200] for log in logs[-1:] for line in last_lines(log)]
            said = " | ".join([line for line in lines if line][-3:])
    head, _, start = now.reason.partition(": ")
    ended = f"job {job.id} ended as {job.state}{code}{said and f'; its log ends: {said}'}"
    return f"{head}: {ended}; see 'hpctk logs --job {job.id}', then {start}"


def _found(record: JobRecord) -> tuple[str, bool]:
    """A sentence on why a job waits, and whether it can start only after a person acts."""
    word = record.reason.partition(",")[0].strip("()") or "None"
    if record.state in _STUCK and word not in ("JobHeldAdmin", "JobHoldMaxRequeue"):
        word = record.state
    for table in (_STUCK, _WAITS):
        for pattern, sentence in table.items():
            if re.fullmatch(pattern, word):
                return sentence.replace("{id}", record.id), table is _STUCK
    return f"Slurm says {word}", False


def why_waiting(record: JobRecord) -> str:
    """Return a sentence on why a job waits, with a remedy if there is one.

    For a reason that is not listed above, the sentence quotes Slurm's word.
    """
    return _found(record)[0]


def is_stuck(record: JobRecord) -> bool:
    """Return whether this waiting job can start only after a person acts."""
    return record.waiting and _found(record)[1]
