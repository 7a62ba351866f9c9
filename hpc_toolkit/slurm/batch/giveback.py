"""Gives nodes of a running job back when all their ranks have left.

Beside the step of a job script, where jobs may shrink. Ranks leave when they had nothing to do for
a while (``hpctk work --idle-exit``); without this their node stays allocated until the last rank of
the job is done. The first node is kept: the script runs on it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hpc_toolkit.errors import ConfigError
from hpc_toolkit.queue.presence import FINISHED, read_presence
from hpc_toolkit.slurm.client import SlurmError
from hpc_toolkit.slurm.controller import host_names, job_nodes, set_nodes
from hpc_toolkit.system.ranks import RankInfo, host_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.rundir.layout import RunPaths

_STARTING_S = 900.0
_REFUSALS = 10
"""Looks in a row at which Slurm refuses to shrink the job, before giving back ends."""


def kept_nodes(
    nodes: list[str],
    ranks: Iterable[Presence],
    *,
    job: str,
    restart: int,
    first: str,
    starting: bool = True,
) -> list[str]:
    """Those of ``nodes`` that still have work, in their order.

    A node is given back when it had ranks in this start of the job and all of them said that they
    left. One whose ranks are silent or dead is kept, and while the job is ``starting`` one without
    any; later such a node was left out, because it is not fit.
    """
    begun: set[str] = set()
    at_work: set[str] = set()
    for presence in ranks:
        if (presence.job, presence.restart) == (job, restart):
            begun.add(presence.host)
            if presence.state != FINISHED:
                at_work.add(presence.host)
    return [
        node
        for node in nodes
        if node == first or node in at_work or (starting and node not in begun)
    ]


def give_back(paths: RunPaths, *, every_s: float) -> Iterator[list[str]]:
    """Look every ``every_s`` seconds until only the first node is left; yield what was given back.

    To be called by the script of a Slurm job, on its first node. Nodes that the job loses are left
    out. While Slurm does not say which nodes the job has, nothing is given back.

    Raises:
        ConfigError: this is not a Slurm job.
        SlurmError: Slurm refuses to shrink the job at ten looks in a row.
    """
    rank, listed = RankInfo.from_environ(), os.environ.get("SLURM_JOB_NODELIST")
    if rank.job_id is None or listed is None:
        msg = "this is not a Slurm job, and has no nodes to give back"
        raise ConfigError(msg, hint="job scripts give them back by themselves")
    nodes = host_names(listed)
    refusals = 0
    started = time.monotonic()
    while len(nodes) > 1:
        time.sleep(every_s)
        found = [read_presence(path) for path in paths.workers.glob("*.json")]
        kept = kept_nodes(
            nodes,
            [one for one in found if one is not None],
            job=rank.job_id,
            restart=rank.restart,
            first=host_name(),
            starting=time.monotonic() - started < _STARTING_S,
        )
        # Slurm refuses a list with a node that the job has lost.
        present = _present_nodes(rank.job_id) if kept != nodes else None
        if present is None:
            continue
        kept = [node for node in kept if node in present]
        idle = [node for node in present if node not in kept]
        try:
            if idle:
                set_nodes(rank.job_id, kept)
        except SlurmError:
            # A node may have been lost since it was listed, or slurmdbd may not answer.
            refusals += 1
            if refusals == _REFUSALS:
                raise
            continue
        refusals, nodes = 0, kept
        if idle:
            yield idle


def _present_nodes(job: str) -> list[str] | None:
    """The nodes that a job has now; None while Slurm does not say."""
    try:
        return job_nodes(job)
    except SlurmError:
        return None
