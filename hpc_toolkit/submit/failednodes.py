"""Nodes that failed for a run not long ago: the next submission leaves them out.

A node that comes back after a failure often fails again, and Slurm gives it out at once.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import read_presence

if TYPE_CHECKING:
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.slurm.records import JobRecord

MOST = 4
"""Never more nodes than this are left out; where more failed, the cause is elsewhere."""
_RECENT_S = 86400.0


def failed_nodes(view: RunView, records: list[JobRecord]) -> dict[str, str]:
    """The nodes to leave out, latest first, each with the reason.

    Args:
        view: of the run, up to date.
        records: of the run's jobs, as Slurm tells.
    """
    found = _of_journals(view)
    for name, failure in _of_jobs(records).items():
        found[name] = max(failure, found.get(name, failure))
    recent = sorted(found.items(), key=lambda entry: -entry[1][0])
    now = time.time()
    return {name: why for name, (at, why) in recent if now - at < _RECENT_S and _plain(name)}


def _of_journals(view: RunView) -> dict[str, tuple[float, str]]:
    """Hosts of workers whose death a node failure explains: when, and the reason."""
    found: dict[str, tuple[float, str]] = {}
    for stage in view.stages.values():
        for unit in stage.state.units.values():
            for death in unit.deaths.values():
                if death.explained != "node failure":
                    continue
                presence = read_presence(view.paths.worker(death.worker))
                at = presence.at if presence is not None else 0.0
                job = f" of job {presence.job}" if presence is not None and presence.job else ""
                if at >= found.get(death.host, (0.0, ""))[0]:
                    found[death.host] = at, f"it failed under worker {death.worker}{job}"
    return found


def _of_jobs(records: list[JobRecord]) -> dict[str, tuple[float, str]]:
    """Nodes of jobs that ended by a node's failure: of several nodes those that still are down."""
    from hpc_toolkit.slurm.client import SlurmError, host_names, node_states

    found: dict[str, tuple[float, str]] = {}
    for record in records:
        if record.state not in ("NODE_FAIL", "BOOT_FAIL") or not record.nodes:
            continue
        try:
            names = host_names(record.nodes)
        except SlurmError:
            continue
        if len(names) > 1:
            names = [name for name, node in node_states(names).items() if node.failed]
        for name in names:
            failure = record.end or 0.0, f"job {record.id} ended with {record.state}"
            found[name] = max(failure, found.get(name, failure))
    return found


def _plain(name: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}", name) is not None
