"""Who lives: the verdict of one observer about the other workers (rule R6).

A wrong verdict repeats work and does no harm, because nothing but a generation's exclusive name and
the rule of the winner decides what counts.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import DRAINING, FINISHED, Presence, read_presence
from hpc_toolkit.queue.probes import DIRECT, LOCK, PRESENCE, Probes, ProbeTimeoutError
from hpc_toolkit.rundir import files

if TYPE_CHECKING:
    from hpc_toolkit.queue.control import DeathNotice
    from hpc_toolkit.rundir.layout import RunPaths
    from hpc_toolkit.system.clock import Clock

_MISSED = 1.5
"""Heartbeats that a worker of another host has missed before its lock is asked for."""

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
    """``lock``, ``lease`` or ``slurm``: what a death was seen by."""
    explained: str = ""
    """What explains a death (``drain``, ``node failure``, ...), so that it suspects no item."""
    host: str = ""
    """Where it ran; "" if unknown."""


class Liveness:
    """Watches the workers of a run from one process, on that process's monotonic clock."""

    def __init__(
        self,
        paths: RunPaths,
        clock: Clock,
        *,
        host: str,
        boot: str,
        lease_s: float,
        job: str | None = None,
        restart: int = 0,
        cluster: str = "",
        locks_proven: bool = False,
        probes: Probes = DIRECT,
    ) -> None:
        self._paths = paths
        self._clock = clock
        self._place = (host, boot)
        self._device: int | None = None
        self._lease_s = lease_s
        self._job = (job, restart)
        self._cluster = cluster
        self._locks_proven = locks_proven
        self._probes = probes
        self._notices: dict[str, DeathNotice] = {}
        self._seen: dict[str, tuple[Presence | None, float]] = {}
        self._looked: dict[str, float] = {}
        self._progress: dict[str, tuple[str, int, int, int, int] | None] = {}
        self._written: dict[str, int] = {}
        self._behind: dict[str, tuple[int, float]] = {}
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
        presence = presence_of(self._paths, worker, self._probes)
        self._looked[worker] = self._clock.monotonic()
        self._progress[worker] = None
        if presence is not None:
            counts = (presence.done, presence.failed, presence.deaths, presence.journal)
            self._progress[worker] = (presence.state, *counts)
            self._written[worker] = presence.journal
        verdict = self._judge(worker, presence)
        # A last word is final, and within one mount a freed lock; a silence may end, and a server
        # frees the locks of a host that it cannot reach.
        freed = verdict.evidence == "lock" and presence is not None and self._is_near(presence)
        if verdict.finished or freed:
            self._gone[worker] = verdict
        return verdict

    def progress(self, worker: str) -> tuple[str, int, int, int, int] | None:
        """State, results, failures, deaths and synced bytes as last read; a change means new lines,
        and their release may follow it. None if its file could not be read."""
        return self._progress.get(worker)

    def is_behind(self, worker: str, size: int) -> bool:
        """Whether a journal of which ``size`` bytes were read is an old copy, not yet for a lease.

        A worker tells what it has synced; a mount may show that before the lines. What does not
        come within a lease was lost with its host. ``size`` is -1 while nobody answers for it.
        """
        written = self._written.get(worker, 0)
        if size >= written:
            return False
        now = self._clock.monotonic()
        wanted, since = self._behind.get(worker, (-1, now))
        if size >= wanted:  # what was waited for is there, and what was told since has its own time
            wanted, since = self._behind[worker] = (written, now)
        return now - since < self._lease_s

    def heartbeat(self, worker: str) -> int | None:
        """The heartbeat number as last read of a worker that is neither dead nor gone."""
        presence, _ = self._seen.get(worker, (None, 0.0))
        return None if presence is None else presence.heartbeat

    def is_final(self, worker: str) -> bool:
        """Whether the verdict about a worker cannot change any more."""
        return worker in self._gone

    def _unheard_s(self, worker: str) -> float:
        """Seconds without a heartbeat, up to the last look: who does not look hears nothing."""
        return self._looked[worker] - self._seen[worker][1]

    def take_notice(self, notice: DeathNotice) -> None:
        """Believe what Slurm said of a worker, until its heart beats again."""
        known = self._notices.get(notice.worker)
        # Files are listed in no order: an older notice must not replace a newer one.
        if known is None or notice.heartbeat >= known.heartbeat:
            self._notices[notice.worker] = notice

    def silent(self, *, missed: float) -> list[Presence]:
        """Workers of jobs of this Slurm that missed so many heartbeats, as last seen; less those of
        which it has spoken already."""
        return [
            presence
            for worker, (presence, _) in self._seen.items()
            if presence is not None
            and presence.job is not None
            and presence.cluster == self._cluster
            and worker not in self._gone
            and self._unheard_s(worker) > missed * presence.interval_s
            and self._notice_of(presence) is None
        ]

    def speaks(self, own: Presence, *, missed: float) -> bool:
        """Whether ``own`` is the first worker of its cluster's jobs that may be alive.

        Two may hold that of themselves, or nobody for a while: it spares Slurm questions, no more.
        """
        return own.job is not None and not any(
            presence is not None
            and presence.job is not None
            and presence.cluster == own.cluster
            and _order(presence) < _order(own)
            and worker not in self._gone
            and self._unheard_s(worker) <= missed * presence.interval_s
            for worker, (presence, _) in self._seen.items()
        )

    def _judge(self, worker: str, presence: Presence | None) -> Verdict:
        if presence is None:
            heard = self._is_heard(worker, None)
            return Verdict(alive=heard, evidence="" if heard else "lease")
        if presence.state == FINISHED:
            return Verdict(alive=False, finished=True)
        evidence = self._evidence(worker, presence)
        if not evidence:
            return Verdict(alive=True)
        explained = self._explanation(presence)
        return Verdict(alive=False, evidence=evidence, explained=explained, host=presence.host)

    def _evidence(self, worker: str, presence: Presence) -> str:
        # One mount of one kernel: a lock held by a process that is gone is free at once. One that
        # is held proves no life: a frozen process holds it too.
        near = self._is_near(presence)
        if near and self._lock_is_free(worker):
            return "lock"
        heard = self._is_heard(worker, presence)
        # Asked of the silent alone: to ask for the lock of every living worker would load the
        # filesystem, and a heartbeat refutes a lock that was lost.
        missed = self._silence_s(worker) > _MISSED * presence.interval_s
        proven = self._locks_proven and not near
        if proven and missed and self._lock_is_free(worker):
            return "lock"
        notice = self._notice_of(presence)
        # A job that is suspended goes on later: to take its units over at once would repeat work
        # after every pause of a gang's turn.
        if (notice is not None and notice.final) or self._was_requeued(presence):
            return "slurm"
        return "" if heard else "lease"

    def _lock_is_free(self, worker: str) -> bool:
        try:
            return self._probes.look(LOCK, worker, lambda: lock_is_free(self._paths, worker))
        except ProbeTimeoutError:
            return False

    def _is_near(self, presence: Presence) -> bool:
        """Whether a worker and this process share a kernel, and the mount: each mount of a FUSE
        filesystem may keep locks of its own."""
        if (presence.host, presence.boot) != self._place:
            return False
        if self._device is None:
            self._device = self._paths.workers.stat().st_dev
        return presence.device in {0, self._device}

    def _silence_s(self, worker: str) -> float:
        """Seconds since a heartbeat that was seen was new."""
        return self._clock.monotonic() - self._seen[worker][1]

    def _notice_of(self, presence: Presence) -> DeathNotice | None:
        """What Slurm said of a worker, unless its heart has beaten since."""
        notice = self._notices.get(presence.worker)
        beats_on = notice is not None and notice.heartbeat != presence.heartbeat
        return None if beats_on else notice

    def _explanation(self, presence: Presence) -> str:
        if presence.state == DRAINING:
            return "drain"
        notice = self._notice_of(presence)
        if notice is not None:
            return notice.explained
        return "requeue" if self._was_requeued(presence) else ""

    def _was_requeued(self, presence: Presence) -> bool:
        # Slurm starts a job again only when its processes of the time before are gone, or their
        # node is lost.
        job, restart = self._job
        same = presence.job == job and presence.cluster == self._cluster
        return job is not None and same and presence.restart < restart

    def _is_heard(self, worker: str, presence: Presence | None) -> bool:
        """Whether the heartbeat changed within the lease, by this observer's monotonic clock."""
        now = self._clock.monotonic()
        last, since = self._seen.get(worker, (None, now))
        # A copy that cannot be read counts as unchanged.
        if worker not in self._seen or (
            presence is not None and (last is None or presence.heartbeat != last.heartbeat)
        ):
            self._seen[worker] = (presence, now)
            return True
        # An owner that beats slowly is not to be judged by an impatient observer's lease.
        lease_s = max(self._lease_s, 3 * (presence.interval_s if presence is not None else 0.0))
        return now - since < lease_s


def _order(presence: Presence) -> tuple[int, str, int, str]:
    """Older jobs first, then lower ranks."""
    number = (presence.job or "").partition("_")[0]
    return (
        int(number) if number.isdigit() else 0,
        presence.job or "",
        presence.rank,
        presence.worker,
    )


def presence_of(paths: RunPaths, worker: str, probes: Probes) -> Presence | None:
    """A worker's last word; None if it cannot be read, or not in time."""
    try:
        return probes.look(PRESENCE, worker, lambda: read_presence(paths.worker(worker)))
    except ProbeTimeoutError:
        return None


def lock_is_free(paths: RunPaths, worker: str) -> bool:
    """Whether nobody holds a worker's lock; False where that cannot be told.

    Means death only within one mount of one kernel. May take as long as the file server likes.
    """
    try:
        # For reading alone: an NFSv4 server lets those who open for writing wait for a lost client
        # that has the file delegated to it.
        fd = os.open(paths.worker_lock(worker), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
