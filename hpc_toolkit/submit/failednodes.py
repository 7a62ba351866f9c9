"""Nodes that failed for a run within a day: the next submission excludes them.

A node that returns after a failure often fails again, and Slurm allocates it at once. The same is
true of a sick node, on which items fail that other nodes finish.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from hpc_toolkit.queue.control import ControlReader
from hpc_toolkit.queue.presence import read_presence
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.slurm.records import JobRecord

MOST = 4
"""Most nodes that are excluded; if more failed, the cause is elsewhere."""
_RECENT_S = 86400.0

Failure = tuple[float, str]
"""(Epoch seconds at which a node failed, description of the failure)."""


def failed_nodes(view: RunView, records: list[JobRecord]) -> dict[str, str]:
    """The nodes to exclude, latest failure first, each with the reason.

    Args:
        view: the view of the run, up to date.
        records: Slurm's records of the run's jobs.
    """
    found: dict[str, Failure] = {}
    sources = (_of_deaths(view), _of_requeues(view, records), _of_jobs(records), _of_sick(view))
    for name, failure in (one for source in sources for one in source):
        found[name] = max(failure, found.get(name, failure))
    recent = sorted(found.items(), key=lambda entry: -entry[1][0])
    now = time.time()
    return {name: why for name, (at, why) in recent if now - at < _RECENT_S and _plain(name)}


def _deaths(view: RunView, explained: str) -> Iterator[tuple[str, Presence | None, str]]:
    """Host, presence and name of the workers whose death has this explanation."""
    for stage in view.stages.values():
        for unit in stage.state.units.values():
            for death in unit.deaths.values():
                if death.explained == explained:
                    yield death.host, read_presence(view.paths.worker(death.worker)), death.worker


def _of_deaths(view: RunView) -> Iterator[tuple[str, Failure]]:
    """Hosts of workers that died of a node failure."""
    for host, presence, worker in _deaths(view, "node failure"):
        at = presence.at if presence is not None else 0.0
        job = f" of job {presence.job}" if presence is not None and presence.job else ""
        yield host, (at, f"it failed under worker {worker}{job}")


def _of_sick(view: RunView) -> Iterator[tuple[str, Failure]]:
    """Hosts that workers of a Slurm job left because items failed there and not elsewhere."""
    control = ControlReader(view.paths)
    control.poll()
    for notice in control.sick:
        presence = read_presence(view.paths.worker(notice.worker))
        if notice.sure and notice.whole and presence is not None and presence.job:
            why = notice.reason.partition(": ")[2]
            yield notice.host, (notice.at, f"{why} (job {presence.job})")


def _of_requeues(view: RunView, records: list[JobRecord]) -> Iterator[tuple[str, Failure]]:
    """Nodes that are down now and had workers of a job's earlier start.

    Slurm requeues the job of a failed node, and the queue then shows only the next start.
    """
    from hpc_toolkit.slurm.controller import node_states

    restarts = {record.id: record.restarts or 0 for record in records}
    before = [presence for _, presence, _ in _deaths(view, "requeue") if presence is not None]
    if any(restarts.values()):
        named = files.list_names(view.paths.workers)
        found = (read_presence(view.paths.workers / name) for name in named if name[-5:] == ".json")
        before += [one for one in found if one and one.restart < restarts.get(one.job or "", 0)]
    nodes = node_states({one.host for one in before})
    for one in before:
        if nodes[one.host].failed:
            yield one.host, (one.at, f"it went down under job {one.job}, which was requeued")


def _of_jobs(records: list[JobRecord]) -> Iterator[tuple[str, Failure]]:
    """Nodes of jobs that a node failure ended; of several nodes, those that are still down."""
    from hpc_toolkit.slurm.client import SlurmError
    from hpc_toolkit.slurm.controller import host_names, node_states
    from hpc_toolkit.slurm.records import NODE_FAILURES

    for record in (start for job in records for start in (job, *job.lost)):
        if record.state not in NODE_FAILURES or not record.nodes:
            continue
        try:
            names = host_names(record.nodes)
        except SlurmError:
            continue
        if len(names) > 1:
            names = [name for name, node in node_states(names).items() if node.failed]
        for name in names:
            yield name, (record.end or 0.0, f"job {record.id} ended with {record.state}")


def _plain(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}", name) is not None
