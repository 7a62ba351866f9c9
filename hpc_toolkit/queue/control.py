"""What is asked of workers, and what is said of them, as new files in ``control/`` (rule R16)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from hpc_toolkit.rundir.layout import RunPaths

_DRAIN, _DEATHS, _SICK = "drain", "deaths", "sick"

SUSPENDED = "suspended"
"""Explains a silence that may end: the lease decides when it is a death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeathNotice:
    """Slurm said that a worker's job or node ended, which speeds a verdict up (rule R6), or that
    its job is suspended, which only explains one."""

    worker: str
    """Of whom."""
    heartbeat: int
    """The last heartbeat number before Slurm was asked: a worker that beats on refutes it."""
    explained: str
    """What ended it: ``preemption``, ``time limit``, ``node failure``, ``cancel``, ``requeue``,
    ``suspended``; "" where nothing explains the death."""

    @property
    def final(self) -> bool:
        """Whether it is a death by itself."""
        return self.explained != SUSPENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class SickNotice:
    """So much failed in a row on a host that the host may be the reason. Decides no item's state:
    it asks workers of other hosts for their opinion of those items, and says why workers left."""

    host: str
    """Where it failed."""
    worker: str
    """Who says so, of its own host."""
    whole: bool
    """Whether it is said of the host, or else of this worker alone, such as of its GPU."""
    sure: bool
    """Whether other hosts finished those items, or else are asked to try them."""
    at: float
    """Epoch seconds, on that host's clock."""
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request to leave."""

    name: str
    """The file's name."""
    workers: frozenset[str]
    """Whom it is meant for; others ignore it."""


def ask_to_drain(paths: RunPaths, workers: list[str]) -> None:
    """Ask these workers to finish their item and leave; it cannot be taken back."""
    _write(paths, _DRAIN, workers)


def give_notice(paths: RunPaths, notices: list[DeathNotice]) -> None:
    """Tell all workers what Slurm said."""
    found = {n.worker: {"heartbeat": n.heartbeat, "explained": n.explained} for n in notices}
    _write(paths, _DEATHS, found)


def give_sick_notice(paths: RunPaths, notice: SickNotice) -> None:
    """Tell all workers that a host may be sick, or is."""
    _write(paths, _SICK, [notice.worker], **asdict(notice))


def _write(paths: RunPaths, request: str, workers: object, **more: object) -> None:
    path = paths.control / f"{request}-{os.urandom(4).hex()}.json"
    record = {"request": request, "workers": workers, **more}
    files.write_new(path, [json.dumps(record).encode()])


class ControlReader:
    """Reads every file in ``control/`` once; they are immutable."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: set[str] = set()
        self.sick: list[SickNotice] = []
        """Every notice of a sick host that was read so far."""

    def poll(self) -> tuple[list[Request], list[DeathNotice]]:
        """What is new. A file that cannot be read yet is looked at again next time."""
        requests: list[Request] = []
        notices: list[DeathNotice] = []
        for name in files.list_names(self._paths.control):
            if name in self._read or not name.endswith(".json"):
                continue
            try:
                record = json.loads(files.read_fresh(self._paths.control / name))
                if record["request"] == _DRAIN:
                    requests.append(Request(name, frozenset(record["workers"])))
                elif record["request"] == _DEATHS:
                    notices += _notices(record["workers"])
                elif record["request"] == _SICK:
                    self.sick.append(_sick_notice(record))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
                continue
            self._read.add(name)
        return requests, notices


def _notices(workers: dict[str, dict[str, Any]]) -> list[DeathNotice]:
    return [
        DeathNotice(worker=name, heartbeat=int(said["heartbeat"]), explained=str(said["explained"]))
        for name, said in workers.items()
    ]


def _sick_notice(record: dict[str, Any]) -> SickNotice:
    return SickNotice(
        host=str(record["host"]),
        worker=str(record["worker"]),
        whole=bool(record["whole"]),
        sure=bool(record["sure"]),
        at=float(record["at"]),
        reason=str(record["reason"]),
    )
