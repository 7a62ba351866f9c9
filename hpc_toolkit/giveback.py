"""Gives nodes of a running job back when all their ranks have left.

``python -m hpc_toolkit.giveback RUN`` runs beside the step of a job script, where jobs may
shrink. Ranks leave when they had nothing to do for a while (``hpctk work --idle-exit``); without
this their node stays allocated until the last rank of the job is done. The first node is kept: the
script runs on it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_toolkit.errors import HpcToolkitError
from hpc_toolkit.layout import RunPaths
from hpc_toolkit.processes import die_with_parent
from hpc_toolkit.queue.presence import FINISHED, read_presence
from hpc_toolkit.ranks import RankInfo, host_name
from hpc_toolkit.slurm.client import SUBMIT_S, failure, run
from hpc_toolkit.slurm.controller import host_names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpc_toolkit.queue.presence import Presence

_EVERY_S = 60.0
_STARTING_S = 900.0


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


def shrink(job: str, nodes: list[str]) -> None:
    """Have Slurm take all other nodes from a running job of ours (scontrol(1), NodeList).

    Raises:
        SlurmError: it refuses.
    """
    argv = ["scontrol", "update", f"JobId={job}", f"NodeList={','.join(nodes)}"]
    # scontrol leaves scripts for resetting a shell's variables where it is called.
    with tempfile.TemporaryDirectory() as elsewhere:
        done = run(argv, timeout_s=SUBMIT_S, cwd=Path(elsewhere))
    if done.code:
        raise failure(argv, done)


def main(arguments: list[str]) -> int:
    """Look once a minute until only the first node is left or Slurm refuses."""
    die_with_parent()
    paths, rank = RunPaths(Path(arguments[0])), RankInfo.from_environ()
    if rank.job_id is None:
        sys.stderr.write("error: this is no Slurm job\n")
        return 2
    every_s = float(arguments[1]) if len(arguments) > 1 else _EVERY_S
    try:
        nodes = host_names(os.environ["SLURM_JOB_NODELIST"])
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
            if kept != nodes:
                shrink(rank.job_id, kept)
                gone = " ".join(node for node in nodes if node not in kept)
                sys.stdout.write(f"gave back {gone}: their ranks have left\n")
                sys.stdout.flush()
                nodes = kept
    except HpcToolkitError as error:
        sys.stderr.write(f"note: no node is given back: {error.message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
