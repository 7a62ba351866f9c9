"""Slurm liveness: ask Slurm about silent workers, so that units need not wait for the lease.

``python -m hpc_toolkit.worker.slurmliveness RUN WORKER:HEARTBEAT...`` asks once and writes the
answer as a notice for all workers. A worker starts it as a child process, because Slurm may take
minutes to answer and the heartbeat must not wait. No answer proves nothing; then the lease decides
(rule R6).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import OUT_OF_MEMORY, SUSPENDED, DeathNotice, give_notice, may_ask
from hpc_toolkit.queue.presence import FINISHED, Presence, host_part, read_presence
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.processes import children_of, die_with_parent, kill_group
from hpc_toolkit.system.ranks import RankInfo

if TYPE_CHECKING:
    import subprocess

    from hpc_toolkit.slurm.records import JobRecord, NodeRecord

MISSED = 2.5
"""Heartbeats that a worker must have missed before Slurm is asked."""

_FIRST_S, _LONGEST_S = 30.0, 600.0
_OTHERS_S = 45.0
"""Seconds in which the answer to another worker's question should have come."""
_BEATS_S = 30.0
"""Seconds within which the observer of a node writes at least one heartbeat, if it lives."""
_PATIENCE_S = 60.0
_LEAVING_S = 2.0

# Slurm's job states that explain an end or a stop, and our words for them.
_EXPLAINED = {
    "PREEMPTED": "preemption",
    "TIMEOUT": "time limit",
    "DEADLINE": "time limit",
    "NODE_FAIL": "node failure",
    "BOOT_FAIL": "node failure",
    "CANCELLED": "cancel",
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "REVOKED": "cancel",
    "REQUEUED": "requeue",
    "PENDING": "requeue",
    "SUSPENDED": SUSPENDED,
    "STOPPED": SUSPENDED,
}
_TELLING = {"COMPLETED", "FAILED"} | _EXPLAINED.keys()


def judge(
    silent: list[Presence], jobs: Mapping[str, JobRecord], nodes: Mapping[str, NodeRecord]
) -> list[DeathNotice]:
    """Derive death notices for silent workers from Slurm's records; none if these are unclear."""
    found = []
    for one in silent:
        job, node = jobs.get(one.job or ""), nodes.get(one.host)
        if node is not None and node.failed:
            why = "node failure"
        elif job is not None and (job.restarts or 0) > one.restart:
            why = "requeue"
        elif job is not None and job.state in _TELLING:
            why = _EXPLAINED.get(job.state, "")
        else:
            continue
        found.append(DeathNotice(worker=one.worker, heartbeat=one.heartbeat, explained=why))
    return found


class SlurmLiveness:
    """The worker's side: starts the child when a query is due, and never waits for its answer."""

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root = root
        self._clock = clock
        self._asked_s = _FIRST_S
        self._ask_at = float("-inf")
        self._times = 0
        self._quiet_until = float("-inf")
        self._about: frozenset[str] = frozenset()
        self._child: subprocess.Popen[bytes] | None = None

    def ask(self, silent: list[Presence], own: Presence, asked: int) -> None:
        """Query Slurm about these workers, less and less often while the same ones stay silent.

        ``asked``: how often workers of this cluster have asked, as far as is known. One question is
        about all nodes, so another worker's answer is awaited.
        """
        if self._child is not None and self._child.poll() is None:
            return
        now = self._clock.monotonic()
        if asked > self._times:
            self._times, self._quiet_until = asked, now + _OTHERS_S
        workers = {presence.worker for presence in silent}
        new = not self._about.issuperset(workers)
        if not workers or now < self._quiet_until or (now < self._ask_at and not new):
            return
        if not self._is_first(own):
            return
        self._about = frozenset(workers)
        self._asked_s = _FIRST_S if new else min(_LONGEST_S, 2 * self._asked_s)
        self._ask_at = now + self._asked_s
        self._start(silent)

    def _is_first(self, own: Presence) -> bool:
        with suppress(OSError):  # then nobody asks now
            if may_ask(RunPaths(self._root), own.cluster, self._times, own.worker):
                self._times += 1
                return True
        self._quiet_until = self._clock.monotonic() + _OTHERS_S
        return False

    def _start(self, silent: list[Presence]) -> None:
        import subprocess

        # The heartbeat shows whether a worker was still silent when Slurm answered.
        words = [f"{presence.worker}:{presence.heartbeat}" for presence in silent]
        # If no process can be started now, skip the query instead of failing this worker.
        with suppress(OSError, subprocess.SubprocessError):
            self._child = subprocess.Popen(
                [sys.executable, "-Pm", __name__, str(self._root), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # A worker has one thread.
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509
            )

    def close(self) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        import subprocess

        self._child.terminate()  # it ends its own children, which SIGKILL would leave running
        try:
            self._child.wait(_LEAVING_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _leave(*_: object) -> None:
    """Kill the Slurm program that does not answer, then exit.

    An exception alone could leave the client before it knows the program that it has just started.
    """
    for pid in children_of(os.getpid()):
        kill_group(pid)
    sys.exit(0)


def main(arguments: list[str]) -> int:
    """Ask Slurm once about workers, given as ``NAME:HEARTBEAT``; 0 even without an answer."""
    from hpc_toolkit.slurm.controller import node_states

    paths, cluster = RunPaths(Path(arguments[0])), RankInfo.from_environ().cluster
    beats = {name: beat for name, _, beat in (word.rpartition(":") for word in arguments[1:])}
    known = _living(paths, [*beats], cluster)
    silent = [one for one in known if str(one.heartbeat) == beats[one.worker]]
    jobs = _notice(paths, silent)
    asked = {host_part(one.worker) for one in silent}
    names = [name[:-5] for name in files.list_names(paths.workers) if name.endswith(".json")]
    if waiting := {key: job for key, job in jobs.items() if _EXPLAINED.get(job.state) == SUSPENDED}:
        # Others watch the job's other nodes, and may not ask before these would count as dead.
        others = _living(paths, [name for name in names if name not in beats], cluster)
        give_notice(paths, judge(others, waiting, {}))
    nodes = node_states(sorted({*map(host_part, names)} - asked), timeout_s=_PATIENCE_S)
    lost = {name for name, node in nodes.items() if node.failed}
    before = _living(paths, [name for name in names if host_part(name) in lost], cluster)
    if before:
        # A node whose slurmd alone has died is lost for Slurm, and its workers go on.
        intervals: dict[str, float] = {}
        for one in before:  # the observer's is the shortest
            intervals[one.host] = min(one.interval_s, intervals.get(one.host, one.interval_s))
        time.sleep(max(_BEATS_S, MISSED * max(intervals.values())))
        after = {one.worker: one for one in _living(paths, [o.worker for o in before], cluster)}
        beat = {one.host for one in before if after.get(one.worker) != one}
        _notice(paths, [one for one in before if one.host not in beat])
    return 0


def _living(paths: RunPaths, names: list[str], cluster: str) -> list[Presence]:
    """The workers of these names that have not finished, in jobs of a cluster."""
    found = [one for one in (read_presence(paths.worker(name)) for name in names) if one]
    # Only this cluster's Slurm can be asked here, and other clusters use the same job ids.
    return [one for one in found if one.cluster == cluster and one.job and one.state != FINISHED]


def _notice(paths: RunPaths, silent: list[Presence]) -> dict[str, JobRecord]:
    """Ask Slurm about these workers, and write its answer; the records of their jobs."""
    # Imported here, because workers import this module too but do not call this.
    from hpc_toolkit.slurm.client import job_states
    from hpc_toolkit.slurm.controller import node_states

    jobs = job_states(sorted({one.job for one in silent if one.job}), timeout_s=_PATIENCE_S)
    nodes = node_states(sorted({one.host for one in silent}), timeout_s=_PATIENCE_S)
    if notices := judge(silent, jobs, nodes):
        give_notice(paths, notices)
    return jobs


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
