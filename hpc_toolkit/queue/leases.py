"""Which workers are alive: the verdicts of one observer about the other workers (rule R6).

A wrong verdict only repeats work, because the exclusive name of a generation and the rule of the
winner (R11) alone decide which result counts.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpc_toolkit.errors import TRANSIENT
from hpc_toolkit.queue.control import OUT_OF_MEMORY, WEAK, DeathNotice
from hpc_toolkit.queue.presence import (
    DIRECT,
    DRAINING,
    FINISHED,
    LOCK,
    Presence,
    Probes,
    ProbeTimeoutError,
    presence_of,
)
from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.clock import Clock
from hpc_toolkit.system.ranks import of_slurm, process_id
from hpc_toolkit.system.record import Record

_LOCK_WITHIN_S = 60.0
_LOCK_RETRY_S = 0.05
_MISSED = 1.5
"""Heartbeats that a worker on another host must miss before its lock is tested."""

POOL_ENDED = "end of its pool"
"""Explains the death of a worker whose pool is gone too: no item ended that process."""

DEFAULT_LEASE_S = 180.0
"""Seconds without a new heartbeat after which an owner counts as dead if locks prove nothing."""


def heartbeat_interval_s(workers: int) -> float:
    """Seconds between two heartbeats; longer in a large run, to limit the load."""
    return max(10.0, workers / 50)


class Verdict(Record):
    """What one observer concludes about one worker."""

    alive: bool
    finished: bool = False
    """It exited by itself and all its lines are synced."""
    evidence: str = ""
    """What showed a death: ``lock``, ``lease`` or ``slurm``, perhaps with ``, out of memory``."""
    explained: str = ""
    """Reason of a death (``drain``, ``node failure``, ...); no item is suspected then."""
    host: str = ""
    """Host on which it ran; "" if unknown."""


class _Seen(Record, frozen=False):
    """What this observer has seen of one worker; times are of its monotonic clock."""

    presence: Presence | None = None
    """The presence at the last change of the heartbeat."""
    since: float | None = None
    """Time of that change, or of the first look; None before."""
    looked: float = 0.0
    """Time of the last look."""
    progress: object = None
    written: int = 0
    """Bytes of its journal that it reported last."""
    awaited: tuple[int, float] = (-1, 0.0)
    """Bytes that an old copy of the journal lacks, and the time since when they are awaited."""
    final: Verdict | None = None
    """A verdict that can no longer change."""

    def silent_s(self, now: float) -> float:
        return now - (now if self.since is None else self.since)


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
        self.paths, self.clock = paths, clock
        self.host, self.boot, self.lease_s = host, boot, lease_s
        self.job, self.restart, self.cluster = job, restart, cluster
        self.locks_proven, self.probes = locks_proven, probes
        self._device: int | None = None
        self._notices: dict[str, DeathNotice] = {}
        self._seen: defaultdict[str, _Seen] = defaultdict(_Seen)

    def names(self) -> list[str]:
        """All workers that ever started, as far as this host shows them."""
        listed = files.list_names(self.paths.workers)
        return sorted(name[:-5] for name in listed if name.endswith(".json"))

    def verdict(self, worker: str) -> Verdict:
        """Judge whether ``worker`` is alive, as far as this observer can tell now."""
        seen = self._seen[worker]
        if seen.final is not None:
            return seen.final
        presence = presence_of(self.paths, worker, self.probes)
        seen.looked = self.clock.monotonic()
        seen.progress = None if presence is None else presence.progress
        if presence is not None:
            seen.written = presence.journal
        verdict = self._judge(worker, presence)
        # The state "finished" is final, and so is a freed lock within one mount. A silence may end,
        # and a server frees the locks of a host that it cannot reach.
        lock = verdict.evidence.startswith("lock")
        freed = lock and presence is not None and self._is_near(presence)
        # Another host may have said so, by a lock that the server freed in a pause of the network.
        if verdict.finished or (freed and self._lock_is_free(worker)):
            seen.final = verdict
        return verdict

    def progress(self, worker: str) -> object:
        return self._seen[worker].progress

    def is_behind(self, worker: str, size: int) -> bool:
        """Whether a journal of which ``size`` bytes were read is an old copy; False after a lease.

        A worker reports how many bytes it has synced, and a mount may show the report before the
        lines. Lines that do not appear within a lease were lost with their host. ``size`` is -1
        while the file server does not answer.
        """
        seen = self._seen[worker]
        if size >= seen.written:
            return False
        now = self.clock.monotonic()
        if size >= seen.awaited[0]:  # they came; bytes reported since have their own lease
            seen.awaited = (seen.written, now)
        return now - seen.awaited[1] < self.lease_s

    def heartbeat(self, worker: str) -> int | None:
        """The last heartbeat number seen of a worker; None if none was readable."""
        presence = self._seen[worker].presence
        return None if presence is None else presence.heartbeat

    def is_final(self, worker: str) -> bool:
        return worker in self._seen and self._seen[worker].final is not None

    def lease_left_s(self, worker: str) -> float:
        """Seconds until the silence of a worker lasts a lease.

        Infinite unless two looks have shown that it missed a heartbeat.
        """
        seen = self._seen[worker]
        interval_s = 0.0 if seen.presence is None else seen.presence.interval_s
        if seen.silent_s(seen.looked) <= interval_s:
            return math.inf
        return self._lease_of(seen.presence) - seen.silent_s(self.clock.monotonic())

    def has_seen(self, worker: str) -> bool:
        return worker in self._seen

    def silence_of(self, worker: str) -> tuple[float, float]:
        """How long a worker was silent at the last look, and its interval between heartbeats."""
        seen = self._seen[worker]
        interval_s = 0.0 if seen.presence is None else seen.presence.interval_s
        return seen.silent_s(seen.looked), interval_s

    def watches_for(self, worker: str) -> int:
        """Number of workers of its node that a worker watches for; 0 if it watches for none."""
        presence = self._seen[worker].presence
        return 0 if presence is None else presence.node

    def claim_of(self, worker: str) -> str:
        """The unit that a worker ran at its last heartbeat, as ``STAGE/UNIT.GENERATION``; or ""."""
        presence = self._seen[worker].presence
        return "" if presence is None else presence.claim

    def notice(self, worker: str, evidence: str, explained: str = "") -> DeathNotice | None:
        """What others need to know of a death; None if Slurm says that the worker is suspended."""
        presence = self._seen[worker].presence
        known = self._notices.get(worker)
        if presence is None or (known is not None and not known.final):
            return None
        return DeathNotice(
            worker=worker,
            heartbeat=presence.heartbeat,
            explained=explained,
            evidence=evidence,
        )

    def take_notice(self, notice: DeathNotice) -> None:
        """Believe what was reported about a worker, until the worker's next heartbeat."""
        known = self._notices.get(notice.worker)
        # Files are listed in no particular order: an older notice must not replace a newer one.
        if known is None or notice.weight >= known.weight:
            self._notices[notice.worker] = notice

    def silent(self, *, missed: float) -> list[Presence]:
        """Workers of this cluster's jobs that missed ``missed`` heartbeats, as last seen.

        Workers about which Slurm has already reported are left out.
        """
        return [
            presence
            for presence, unheard_s in self._of_jobs(self.cluster)
            if unheard_s > missed * presence.interval_s and self._notice_of(presence) is None
        ]

    def _of_jobs(self, cluster: str) -> Iterator[tuple[Presence, float]]:
        """The workers of a cluster's jobs that may live, and how long each was silent.

        The silence is counted up to the last look; the time since then shows nothing.
        """
        for seen in self._seen.values():
            presence = seen.presence
            if presence is None or not of_slurm(presence.job) or seen.final is not None:
                continue
            if presence.cluster == cluster:
                yield presence, seen.silent_s(seen.looked)

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
        if explained == OUT_OF_MEMORY:
            evidence, explained = f"{evidence}, {explained}", ""
        return Verdict(alive=False, evidence=evidence, explained=explained, host=presence.host)

    def _evidence(self, worker: str, presence: Presence) -> str:
        # Within one mount of one kernel, the lock of a process that ended is free at once. A held
        # lock does not prove life, because a frozen process holds its lock too.
        near = self._is_near(presence)
        if near and self._lock_is_free(worker):
            self._seen[worker].presence = presence  # a notice to other hosts needs it
            return "lock"
        heard = self._is_heard(worker, presence)
        # Only locks of silent workers are tested: testing every worker would load the filesystem,
        # and a heartbeat refutes a lock that was lost.
        silent_s = self._seen[worker].silent_s(self.clock.monotonic())
        missed = silent_s > _MISSED * presence.interval_s
        proven = self.locks_proven and not near
        if proven and missed and self._lock_is_free(worker):
            return "lock"
        notice = self._notice_of(presence)
        # A suspended job continues later. Taking over its units at once would repeat work after
        # every pause under gang scheduling.
        if notice is not None and notice.final:
            return notice.evidence
        if self._was_requeued(presence):
            return "slurm"
        return "" if heard else "lease"

    def _lock_is_free(self, worker: str) -> bool:
        try:
            return self.probes.look(LOCK, worker, lambda: lock_is_free(self.paths, worker))
        except ProbeTimeoutError:
            return False

    def _is_near(self, presence: Presence) -> bool:
        """Whether a worker shares this kernel and mount; each FUSE mount may keep its own locks."""
        if (presence.host, presence.boot) != (self.host, self.boot):
            return False
        if self._device is None:
            self._device = self.paths.workers.stat().st_dev
        return presence.device in {0, self._device}

    def _notice_of(self, presence: Presence) -> DeathNotice | None:
        """Slurm's notice about a worker, unless a heartbeat has come since."""
        notice = self._notices.get(presence.worker)
        beats_on = notice is not None and notice.heartbeat != presence.heartbeat
        return None if beats_on else notice

    def _explanation(self, presence: Presence) -> str:
        if presence.state == DRAINING:
            return "drain"
        notice = self._notice_of(presence)
        told = "" if notice is None else notice.explained
        if told not in WEAK:
            return told
        if self._was_requeued(presence):
            return "requeue"
        return POOL_ENDED if self._lost_its_pool(presence) else told

    def _lost_its_pool(self, presence: Presence) -> bool:
        """Whether the pool of a dead worker is gone too, such as after ``kill -9`` of a script.

        A pool outlives its workers, and starts a new one for each that an item kills.
        """
        if not (presence.pool and self._is_near(presence)):
            return False
        pid, _, namespace = presence.pool
        now = process_id(pid)
        return namespace == now[2] and presence.pool != now

    def _was_requeued(self, presence: Presence) -> bool:
        # Slurm restarts a job only when its earlier processes are gone, or their node is lost.
        same = presence.job == self.job and presence.cluster == self.cluster
        return self.job is not None and same and presence.restart < self.restart

    def _is_heard(self, worker: str, presence: Presence | None) -> bool:
        """Whether the heartbeat changed within the lease, by this observer's monotonic clock."""
        now = self.clock.monotonic()
        seen, last = self._seen[worker], self._seen[worker].presence
        # An unreadable copy counts as unchanged.
        if seen.since is None or (
            presence is not None and (last is None or presence.heartbeat != last.heartbeat)
        ):
            seen.presence, seen.since = presence, now
            return True
        return now - seen.since < self._lease_of(presence)

    def _lease_of(self, presence: Presence | None) -> float:
        # An observer with a short lease must not declare a slowly beating owner dead.
        return max(self.lease_s, 3 * (presence.interval_s if presence is not None else 0.0))


class WorkerLock:
    """The lock that a worker holds until its process ends, however it ends.

    Other processes see by the free lock that the worker has ended. A worker whose filesystem has
    no locks works without one, and only the lease shows its death.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError: the lock is free, and could be held later; others would see a death."""
        self._fd = -1
        try:
            self._fd = files.open_or_create(path, os.O_RDWR | os.O_NOFOLLOW)
            self._take()
        except OSError as error:
            self.close()
            if error.errno in TRANSIENT:
                raise
            with suppress(OSError):  # the next test of the lock may be answered: it is free
                path.unlink()

    def _take(self) -> None:
        give_up_at = time.monotonic() + _LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # another process is testing the lock
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(_LOCK_RETRY_S)
            else:
                return

    def close(self) -> None:
        """Release the lock before the process ends."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # closing releases it too, unless a child has the descriptor
                fcntl.flock(fd, fcntl.LOCK_UN)
            with suppress(OSError):
                os.close(fd)


def lock_is_free(paths: RunPaths, worker: str) -> bool:
    """Whether no process holds a worker's lock; False if that cannot be determined.

    A free lock means death only within one mount of one kernel, or where locks between hosts are
    proven. The call takes as long as the file server needs.
    """
    try:
        # Read-only: an NFSv4 server makes an open for writing wait for a lost client that has a
        # delegation of the file.
        fd = os.open(paths.worker_lock(worker), os.O_RDONLY)
    except OSError:
        return False
    with files.closing(fd), suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False
