"""Requests to workers and notices about them: new files in ``control/`` (rule R16)."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.record import Record, asdict

_DRAIN, _DEATHS, _SICK, _FREE, _ASKED = "drain", "deaths", "sick", "free", "asked"

SUSPENDED = "suspended"
"""Explains a silence that may end; the lease decides when it counts as a death."""
SILENT_NODE = "silent node"
"""Explains the deaths of all workers of a node, unless one item ran on several such nodes."""
WEAK = ("", SUSPENDED, SILENT_NODE)
"""Explanations that yield to what ended the job of the same worker."""
OUT_OF_MEMORY = "out of memory"
"""Explains a death for which the suspected item is to blame."""


class DeathNotice(Record, kw_only=True):
    """A report that a worker is dead, by Slurm or by another worker, or that its job is suspended.

    An end speeds up a verdict (rule R6); a suspension only explains one.
    """

    worker: str
    """Name of the worker."""
    heartbeat: int
    """The last heartbeat number before Slurm was asked; a further heartbeat refutes the notice."""
    explained: str
    """What ended or suspended the job; "" if nothing explains the death.

    ``preemption``, ``time limit``, ``node failure``, ``cancel``, ``requeue``, ``out of memory``,
    ``silent node`` or ``suspended``.
    """
    evidence: str = "slurm"
    """What showed the death, as in :class:`hpc_toolkit.queue.leases.Verdict`."""

    @property
    def final(self) -> bool:
        return self.explained != SUSPENDED

    @property
    def weight(self) -> tuple[int, bool]:
        """A notice about a worker replaces one that does not weigh more."""
        return self.heartbeat, self.explained not in WEAK


class FreeUnit(Record):
    """A generation of a unit whose owner is dead, as one worker tells all others.

    Or the death alone: a scan that finds a unit of that worker need not wait for a lease.
    """

    stage: str
    """Name of the stage; "" with the death alone."""
    unit: str
    """Name of the unit; "" with the death alone."""
    generation: int
    """The newest generation when this was written; 0 with the death alone."""
    owner: DeathNotice
    """Why its owner counts as dead."""


class HealthNotice(Record, kw_only=True):
    """A report that so many items failed in a row on a host that the host may be the reason.

    It decides no item's state. It asks other hosts to try those items, or says why workers left.
    """

    host: str
    """Host on which the items failed."""
    worker: str
    """The worker that reports it, about its own host."""
    whole: bool
    """Whether it concerns the host; False: this worker alone, for example its GPU."""
    sure: bool
    """Whether other hosts finished those items; False: they are asked to try them."""
    at: float
    """Epoch seconds on that host's clock."""
    reason: str
    """Explanation for people."""


class Request(Record):
    """A request to exit."""

    name: str
    """Name of the file."""
    workers: frozenset[str]
    """The workers that should exit; other workers ignore the request."""


def ask_to_drain(paths: RunPaths, workers: list[str]) -> None:
    """Ask these workers to exit after their current item; this cannot be withdrawn."""
    _write(paths, _DRAIN, workers)


def give_notice(paths: RunPaths, notices: list[DeathNotice]) -> None:
    found = {n.worker: {"heartbeat": n.heartbeat, "explained": n.explained} for n in notices}
    _write(paths, _DEATHS, found)


def give_free(paths: RunPaths, free: FreeUnit, by: str) -> None:
    """Tell all workers of a unit that they may take over.

    The name itself has all that is known: thousands of workers list it, and none opens a file.
    """
    owner = free.owner
    words = (owner.worker, str(owner.heartbeat), owner.evidence, owner.explained.replace(" ", "_"))
    name = ",".join((_FREE, free.stage, free.unit, str(free.generation), *words))
    files.create_name(paths.control / name, by)


def may_ask(paths: RunPaths, cluster: str, times: int, worker: str) -> bool:
    """Whether this worker of all may ask a cluster's Slurm, which ``times`` others did before."""
    path = paths.control / f"{_ASKED},{cluster},{times + 1}"
    return files.create_name(path, worker) == worker


def give_health_notice(paths: RunPaths, notice: HealthNotice) -> None:
    _write(paths, _SICK, [notice.worker], **asdict(notice))


def _write(paths: RunPaths, request: str, workers: object, **more: object) -> None:
    path = paths.control / f"{request}-{os.urandom(4).hex()}.json"
    record = {"request": request, "workers": workers, **more}
    files.write_new(path, [json.dumps(record).encode()])


class ControlReader:
    """Reads every file in ``control/`` once; the files are immutable."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: set[str] = set()
        self.health: list[HealthNotice] = []
        """Every notice about the health of a host read so far."""
        self.asked: Counter[str] = Counter()
        """How often a worker has asked the Slurm of each cluster about silent workers."""
        self.news = False
        """Whether the last call of :meth:`poll` found anything that all workers must know."""
        self.free: list[FreeUnit] = []
        """The units that may be taken over, of which the last call of :meth:`poll` learned."""

    def poll(self) -> tuple[list[Request], list[DeathNotice]]:
        """Return what is new. A file that cannot be read yet is tried again by the next call."""
        requests: list[Request] = []
        notices: list[DeathNotice] = []
        self.free, before = [], len(self._read)
        for name in files.list_names(self._paths.control):
            if name in self._read:
                continue
            if name.startswith(f"{_FREE},"):
                self._read.add(name)
                self.free += _free_unit(name)
                continue
            if name.startswith(f"{_ASKED},"):
                self._read.add(name)
                self.asked[name.split(",")[1]] += 1
                before += 1  # only observers ask
                continue
            if not name.endswith(".json"):
                continue
            try:
                record = json.loads(files.read_fresh(self._paths.control / name))
                if record["request"] == _DRAIN:
                    requests.append(Request(name, frozenset(record["workers"])))
                elif record["request"] == _DEATHS:
                    notices += _notices(record["workers"])
                elif record["request"] == _SICK:
                    said = {key: kind(record[key]) for key, kind in _KINDS.items()}
                    self.health.append(HealthNotice(**said))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
                continue
            self._read.add(name)
        self.news = len(self._read) > before
        return requests, notices


def _free_unit(name: str) -> list[FreeUnit]:
    try:
        _, stage, unit, generation, worker, heartbeat, evidence, explained = name.split(",")
        owner = DeathNotice(
            worker=worker,
            heartbeat=int(heartbeat),
            explained=explained.replace("_", " "),
            evidence=evidence,
        )
        return [FreeUnit(stage, unit, int(generation), owner)]
    except ValueError:
        return []


def _notices(workers: dict[str, dict[str, Any]]) -> list[DeathNotice]:
    return [
        DeathNotice(worker=name, heartbeat=int(said["heartbeat"]), explained=str(said["explained"]))
        for name, said in workers.items()
    ]


_KINDS = {"host": str, "worker": str, "whole": bool, "sure": bool, "at": float, "reason": str}
