"""Give nodes of a running job back to Slurm once all their ranks have left (``--idle-exit``).

Otherwise a node would stay allocated until the last rank of the job is done. The first node is
kept: the script runs on it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED, read_presence
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.controller import job_nodes, set_nodes
from hpc_toolkit.system.ranks import host_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.system.ranks import RankInfo

_STARTING_S = 900.0
_REFUSALS = 10
"""Consecutive refusals to shrink the job after which :func:`shrink_job` raises."""


def kept_nodes(
    nodes: list[str],
    ranks: Iterable[Presence],
    rank: RankInfo,
    *,
    first: str,
    starting: bool = True,
) -> list[str]:
    """Return the ``nodes`` of the job of ``rank`` to keep, in order; ``first`` is always kept.

    A node is given back when it had ranks in this start of the job and all of them reported that
    they left. A node with silent or dead ranks is kept. A node without ranks is kept only while
    the job is ``starting``; later it counts as left out by the preflight.
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

    Called by the batch process of a job, on its first node, with the nodes of the job at its start.
    Nodes that the job loses are ignored. While Slurm does not list the job's nodes, none are given
    back. ``every_s`` are the seconds between two checks.

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
        # Slurm refuses a list that contains a node that the job has lost.
        present = _present_nodes(job) if kept != nodes else None
        if present is None:
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


def _present_nodes(job: str) -> list[str] | None:
    try:
        return job_nodes(job)
    except SlurmError:
        return None
