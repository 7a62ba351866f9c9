"""The status of a lab, from its record and its processes; no daemon is asked."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.lab.config import CONTROL
from hpc_toolkit.lab.directory import read_record
from hpc_toolkit.lab.members import LOOKS, members

if TYPE_CHECKING:
    from hpc_toolkit.lab.members import Member
    from hpc_toolkit.lab.settings import LabPaths, LabSettings

_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class LabStatus:
    """The status of a lab."""

    state: str
    """``up``; ``broken``: processes are left, but daemons are gone or the start did not complete;
    ``down``: no process is left."""
    paths: LabPaths
    settings: LabSettings | None
    """None if no lab is recorded."""
    port: int | None
    """The first of its ports."""
    processes: int
    crashed: tuple[str, ...]
    """Nodes that were crashed on purpose and not restored."""
    gone: tuple[str, ...]
    """Daemons that should run but do not, such as ``slurmd of n3``."""

    def to_json(self) -> dict[str, Any]:
        """The status as ``--json`` prints it."""
        return {
            "state": self.state,
            "directory": str(self.paths.root),
            "slurm_conf": str(self.paths.slurm_conf),
            "settings": self.settings.to_json() if self.settings else None,
            "port": self.port,
            "processes": self.processes,
            "crashed": list(self.crashed),
            "gone": list(self.gone),
        }


def status_of(paths: LabPaths) -> LabStatus:
    """Return the status of the lab in a directory. Writes nothing.

    Scans again for 0.1 s before it reports that a daemon is gone.
    """
    record = read_record(paths)
    found = members(paths.token)
    crashed = _crashed(paths)
    wanted = _daemons(record.settings, crashed) if record is not None else []
    missing = _not_among(wanted, found)
    # One scan can miss a daemon that re-executes itself (slurmd 23.11, 'scontrol reconfigure').
    for _ in range(LOOKS - 1):
        if missing:
            time.sleep(_PAUSE_S)
            missing = _not_among(missing, members(paths.token))
    gone = tuple(f"{name} of {node}" for node, name in missing)
    whole = record is not None and record.ready and not gone
    return LabStatus(
        state="up" if whole else "broken" if found else "down",
        paths=paths,
        settings=record.settings if record else None,
        port=record.port if record else None,
        processes=len(found),
        crashed=crashed,
        gone=gone,
    )


def _crashed(paths: LabPaths) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(paths.crashed)))
    except FileNotFoundError:
        return ()


def _not_among(wanted: list[tuple[str, str]], found: list[Member]) -> list[tuple[str, str]]:
    present = {(one.node, one.name) for one in found}
    return [daemon for daemon in wanted if daemon not in present]


def _daemons(settings: LabSettings, crashed: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (node, command) of every daemon that should run."""
    names = ["munged", "slurmctld", *(["mariadbd", "slurmdbd"] if settings.accounting else [])]
    nodes = [node for node in settings.node_names if node not in crashed]
    return [(CONTROL, name) for name in names] + [(node, "slurmd") for node in nodes]
