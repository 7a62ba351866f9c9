"""Who lives: the verdict of one observer about the other workers (rule R6).

A wrong verdict repeats work and does no harm, because nothing but a generation's exclusive name and
the rule of the winner decides what counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit import files
from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, read_presence

if TYPE_CHECKING:
    from hpc_toolkit.clock import Clock
    from hpc_toolkit.layout import RunPaths

DEFAULT_LEASE_S = 180.0
"""Seconds without a new heartbeat after which an owner counts as dead where locks prove nothing."""


def heartbeat_interval_s(workers: int) -> float:
    """Seconds between two heartbeats: so slow that a large run stays a small load."""
    return max(10.0, workers / 50)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an observer holds of one worker."""

    alive: bool
    finished: bool = False
    """It left by itself and all its lines are synced."""
    evidence: str = ""
    """``lock`` or ``lease``: what a death was seen by."""
    explained: str = ""
    """What explains a death (``drain``), so that it suspects no item."""
    host: str = ""
    """Where it ran; "" if unknown."""


class Liveness:
    """Watches the workers of a run from one process, on that process's monotonic clock."""

    def __init__(
        self, paths: RunPaths, clock: Clock, *, host: str, boot: str, lease_s: float
    ) -> None:
        self._paths = paths
        self._clock = clock
        self._place = (host, boot)
        self._lease_s = lease_s
        self._seen: dict[str, tuple[int | None, float]] = {}
        self._gone: dict[str, Verdict] = {}

    def names(self) -> list[str]:
        """Workers that ever began, as far as this view knows."""
        listed = files.list_names(self._paths.workers)
        return sorted(name[:-5] for name in listed if name.endswith(".json"))

    def verdict(self, worker: str) -> Verdict:
        """Whether ``worker`` lives, as far as this observer can tell now."""
        known = self._gone.get(worker)
        if known is not None:
            return known
        presence = read_presence(self._paths.worker(worker))
        verdict = self._judge(worker, presence)
        # A freed lock and a last word are final; a silence may end.
        if verdict.finished or verdict.evidence == "lock":
            self._gone[worker] = verdict
        return verdict

    def _judge(self, worker: str, presence: Presence | None) -> Verdict:
        if presence is not None and presence.state == FINISHED:
            return Verdict(alive=False, finished=True)
        explained = "drain" if presence is not None and presence.state == DRAINING else ""
        host = presence.host if presence is not None else ""
        # One kernel: a lock held by a process that is gone is free at once. A lock that is held
        # proves no life: a frozen process holds it too.
        same_kernel = presence is not None and (presence.host, presence.boot) == self._place
        if same_kernel and lock_is_free(self._paths, worker):
            return Verdict(alive=False, evidence="lock", explained=explained, host=host)
        now = self._clock.monotonic()
        beat = presence.heartbeat if presence is not None else None
        last, since = self._seen.get(worker, (None, now))
        # A copy that cannot be read counts as unchanged.
        if worker not in self._seen or (beat is not None and beat != last):
            self._seen[worker] = (beat, now)
            return Verdict(alive=True)
        # An owner that beats slowly is not to be judged by an impatient observer's lease.
        lease_s = max(self._lease_s, 3 * (presence.interval_s if presence is not None else 0.0))
        if now - since < lease_s:
            return Verdict(alive=True)
        return Verdict(alive=False, evidence="lease", explained=explained, host=host)


def lock_is_free(paths: RunPaths, worker: str) -> bool:
    """Whether nobody holds a worker's lock; False where that cannot be told.

    Means death only within one kernel.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(paths.worker_lock(worker), timeout=0, fallback_to_soft=False):
            return True
    except (Timeout, OSError, NotImplementedError):
        return False
