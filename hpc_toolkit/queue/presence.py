"""The file in which a worker publishes its identity and its heartbeat."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hpc_toolkit.rundir import files
from hpc_toolkit.rundir.journal import decode_line, seal_line
from hpc_toolkit.system.ranks import RankInfo, boot_id, host_name, process_id, process_ticks
from hpc_toolkit.system.record import Record, asdict, fresh, replace

_LENGTH = 1024

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

    An unknown ``device`` is set to that of its directory. ``local`` as in ``files.is_local``.
    """

    def __init__(self, path: Path, presence: Presence, *, local: bool | None = None) -> None:
        self._path = path
        device = presence.device or path.parent.stat().st_dev
        self.presence = replace(presence, device=device)
        files.write_new(path, [self.presence.encode()])
        self._fd = os.open(path, os.O_WRONLY)
        self._local = files.is_local(path) if local is None else local

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
