"""The file in which a worker publishes its identity and its heartbeat, and looks at such files.

A look may take long. An NFSv4 server that has delegated a file to a client that is now lost answers
other clients only when that client's lease ends, 90 s by default. A server that has just started
delays lock requests as long. A worker that waited for the answer would leave its executor idle.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpc_toolkit.rundir import files, trust
from hpc_toolkit.rundir.journal import decode_line, seal_line
from hpc_toolkit.rundir.layout import RunPaths
from hpc_toolkit.system.ranks import RankInfo, boot_id, host_name, process_id, process_ticks
from hpc_toolkit.system.record import Record, asdict, fresh, replace

T = TypeVar("T")

_LENGTH = 1024

LIMIT_S = 0.5
"""Seconds that a look may take; less while other looks have no answer yet."""

PRESENCE, JOURNAL, LOCK, HEAD = "presence", "journal", "lock", "head"

RUNNING = "running"
DRAINING = "draining"
FINISHED = "finished"
WAITING = "waiting: "
"""How the note of a worker begins that waits for its filesystem; an error follows."""


class Presence(Record, kw_only=True):
    """One worker as others see it."""

    worker: str
    """Name, new for every process."""
    host: str
    """Host name (see :func:`hpc_toolkit.system.ranks.host_name`)."""
    boot: str
    """Id of the host's boot."""
    device: int = 0
    """The kernel's number of the mount through which it writes (st_dev, stat(2)); 0 if unknown."""
    pid: int
    """Process id of the worker on its host."""
    ticks: int = 0
    """Start of that process, in clock ticks since boot; 0 if unknown. Process ids are reused."""
    pool: list[int] = fresh(factory=list)
    """:func:`hpc_toolkit.system.ranks.process_id` of the process that started it and ends after it;
    empty if there is none, as in a job step."""
    rank: int
    """Rank in its job."""
    job: str | None
    """Slurm job id."""
    cluster: str = ""
    """The job's Slurm cluster (SLURM_CLUSTER_NAME); "" if unknown."""
    job_name: str = ""
    """Name of the job."""
    restart: int = 0
    """How often the job had been started before."""
    state: str = RUNNING
    """``running``, ``draining`` or ``finished``."""
    heartbeat: int = 0
    """Grows while the worker is alive; the number has no other meaning."""
    interval_s: float = 10.0
    """Longest time between two heartbeats, in seconds."""
    done: int = 0
    """Items done."""
    failed: int = 0
    """Attempts that failed."""
    deaths: int = 0
    """Executors that died."""
    journal: int = 0
    """Bytes of its journal synced by then; a reader that sees fewer has an old copy."""
    started: float = 0.0
    """Epoch seconds, for display."""
    at: float = 0.0
    """Epoch seconds of the last heartbeat, for display."""
    note: str = ""
    """Why the worker stops or has stopped, for display."""
    node: int = 0
    """Workers of its node that it watches other nodes for, itself included; 0 if it does not."""
    claim: str = ""
    """The unit that it runs, with the stage and the generation; "" if none. May be a beat old."""
    place: dict[str, Any] = fresh(factory=dict)
    """CPUs, GPUs and memory at its start (:class:`hpc_toolkit.system.binding.Place`), for display.

    Empty if unknown, or too long for the file.
    """

    @property
    def progress(self) -> tuple[str, int, int, int, int]:
        """A change of this means that the worker has written journal lines."""
        return self.state, self.done, self.failed, self.deaths, self.journal

    @classmethod
    def here(
        cls, worker: str, rank: RankInfo, *, interval_s: float, at: float, pool: int = 0
    ) -> Presence:
        """The presence of this process, which starts now; ``pool``: the process id of its pool."""
        from hpc_toolkit.system.binding import own_place  # readers do without it

        return cls(
            worker=worker,
            host=host_name(),
            boot=boot_id(),
            pid=os.getpid(),
            ticks=process_ticks(os.getpid()),
            pool=process_id(pool) if pool else [],
            rank=rank.rank,
            job=rank.job_id,
            cluster=rank.cluster,
            job_name=rank.job_name,
            restart=rank.restart,
            interval_s=interval_s,
            started=round(at, 3),
            at=round(at, 3),
            place=own_place().to_record(),
        )

    def encode(self) -> bytes:
        """One line of fixed length for `files.rewrite`; its checksum detects a mix of two."""
        record = asdict(self)
        room = _room(record)
        for name, nothing in (("place", {}), ("note", "")):
            if room < 0:
                record[name] = nothing
                room = _room(record)
        return seal_line(json.dumps({**record, "pad": " " * max(room, 0)})[:-1].encode())

    @classmethod
    def decode(cls, data: bytes) -> Presence | None:
        """Parse a line of :meth:`encode`; None if it is torn or damaged."""
        record = decode_line(data[: data.find(b"\n")])
        if record is None:
            return None
        return cls(**{key: value for key, value in record.items() if key in cls.fields})


def _room(record: dict[str, Any]) -> int:
    return _LENGTH - len(seal_line(json.dumps({**record, "pad": ""})[:-1].encode()))


class PresenceFile:
    """Creates a worker's own presence file and rewrites it in place.

    An unknown ``device`` is set to that of its directory. ``local`` as in ``trust.is_local``.
    """

    def __init__(self, path: Path, presence: Presence, *, local: bool | None = None) -> None:
        self._path = path
        device = presence.device or path.parent.stat().st_dev
        self.presence = replace(presence, device=device)
        files.write_new(path, [self.presence.encode()])
        self._fd = os.open(path, os.O_WRONLY)
        self._local = trust.is_local(path) if local is None else local

    def reopen(self) -> None:
        """Open the file again by its name: after an error the descriptor may be stale."""
        fd = os.open(self._path, os.O_WRONLY)
        self.close()
        self._fd = fd

    def update(self, *, sync: bool = True, beats: bool = True, **changes: Any) -> None:
        """Write changed fields of :class:`Presence` with the next heartbeat number.

        Without ``beats`` the number stays, and other workers see no sign of life. ``sync`` sends
        them to the server now; NFS clients send an unsynced write after 30 s. A new state is always
        sent. After an OSError the changes may be in the file or not.
        """
        state = self.presence.state
        beat = self.presence.heartbeat + beats
        self.presence = replace(self.presence, heartbeat=beat, **changes)
        # Processes of this kernel read what is written, synced or not.
        sync = not self._local and (sync or self.presence.state != state)
        files.rewrite(self._fd, self.presence.encode(), sync=sync)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def read_presence(path: Path) -> Presence | None:
    """Read a worker's presence file; None if it is missing, damaged or unreadable."""
    try:
        return Presence.decode(files.read_fresh(path))
    except (OSError, ValueError, TypeError):
        return None


class ProbeTimeoutError(TimeoutError):
    """The file server has not answered in time; it may do so later."""


class Probes:
    """Looks at other workers' files, each in a thread of its own and for a limited time.

    A look without an answer continues in its thread, and the next look at the same file takes its
    answer. Until then, looks at other files of the same host fail at once. So a lost host costs one
    wait and one thread, however many workers it had. Locks and files are counted separately,
    because a server may answer for one and not for the other.

    A thread lives only during its look. The process may fork between looks, because a remaining
    thread is inside one system call and holds no lock of this process. On NFS the process may end
    during a look. If the look waits for a FUSE filesystem, the kernel keeps the process until that
    answers, up to 120 s where MooseFS has lost a host in the middle of a write.
    """

    def __init__(self, limit_s: float | None = LIMIT_S) -> None:
        self.limit_s = limit_s
        """Seconds for a look; None: look without threads, for as long as it takes."""
        self._unanswered: dict[tuple[str, str], _Look[Any]] = {}

    def look(self, kind: str, worker: str, call: Callable[[], T]) -> T:
        """Return the result of ``call``, or that of an earlier look of this kind at this worker.

        ``kind`` is PRESENCE, JOURNAL or LOCK of a worker, or HEAD of a log, whose ``worker`` is the
        offset that is written. Raises the exception of ``call``, or ProbeTimeoutError if there is
        no answer yet.
        """
        if self.limit_s is None:
            return call()
        key = (kind, worker)
        look: _Look[T] | None = self._unanswered.pop(key, None)
        limit_s = 0.0
        if look is None:
            hung = [one for one, other in self._unanswered.items() if not other.ended.is_set()]
            if _group(key) in map(_group, hung):
                message = f"waiting for the file server to answer for another {kind} of this host"
                raise ProbeTimeoutError(message)
            look = _Look(call)
            limit_s = self.limit_s / (1 + len(hung))
        if look.ended.wait(limit_s):
            return look.result()
        self._unanswered[key] = look
        raise ProbeTimeoutError(f"the file server has not answered for the {kind} of {worker}")

    def wait(self) -> None:
        """Wait until every look has its answer, however long that takes."""
        for look in self._unanswered.values():
            look.ended.wait()


DIRECT = Probes(limit_s=None)
"""Looks without a limit, for programs that may wait and for filesystems of this kernel."""


def host_part(worker: str) -> str:
    """The host as a worker's file name has it; its real name is ``view.presence(worker).host``."""
    return worker.rpartition("-")[0].rpartition("-")[0]


def _group(key: tuple[str, str]) -> tuple[str, str]:
    """The looks that one missing answer blocks: all locks, or all files, of a host."""
    kind, worker = key
    return kind if kind in (LOCK, HEAD) else "file", host_part(worker)


class _Look(Generic[T]):
    """One call in a thread of its own.

    A Future would do as well, but its package imports logging and four more modules into every
    worker.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        import threading  # commands that only read a run look without threads

        self._call = call
        self._answers: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Event()
        try:
            # A daemon, because this process must be able to end while a look hangs.
            threading.Thread(target=self._run, daemon=True).start()
        except RuntimeError:  # no thread can be started now
            self._run()

    def _run(self) -> None:
        try:
            self._answers.append(self._call())
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is taken
            self._error = error
        self.ended.set()

    def result(self) -> T:
        """The answer of a call that has ended; its exception is raised."""
        if self._error is not None:
            raise self._error
        return self._answers[0]


def presence_of(paths: RunPaths, worker: str, probes: Probes) -> Presence | None:
    """Read a worker's presence file; None if that fails or takes too long."""
    try:
        return probes.look(PRESENCE, worker, lambda: read_presence(paths.worker(worker)))
    except ProbeTimeoutError:
        return None
