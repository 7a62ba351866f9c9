"""Read the files of a run in turns, so that a view of its progress costs few file operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.rundir import files
from hpc_toolkit.system.ranks import boot_id, host_name, process_ticks

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.queue.view import RunView
    from hpc_toolkit.system.clock import Clock

FILES_PER_S = 40.0
"""Presences and journals that one view opens per second on a shared filesystem.

All idle workers of a run together use less than 100 operations per second.
"""
_LOCAL_FILES = 500
"""Files per look on a filesystem of this kernel, where only this process pays for them."""
_LEAST_FILES = 16
_LIST_S = 10.0
"""Seconds between two listings of claims and workers: a listing may have ten thousand names."""


def pause_s(view: RunView, at_least: float) -> float:
    """Seconds until a process that reads the files of all workers each time may do so again."""
    is_local = files.is_local(view.paths.root)
    return at_least if is_local else max(at_least, 2 * len(view.readers) / FILES_PER_S)


@dataclass(frozen=True, slots=True)
class _Read:
    presence: Presence | None
    at: float
    """Monotonic seconds."""
    is_last: bool
    """Whether nothing can follow: the worker had left, and its journal was read after that."""


class Sampler:
    """Follows a run: the first look reads everything, later ones new workers and some of the rest.

    Workers are read in turn, and a worker's journal only if its presence shows progress. Nothing
    is written.
    """

    def __init__(self, view: RunView, clock: Clock) -> None:
        self._view, self._clock = view, clock
        self._is_local = files.is_local(view.paths.root)
        self._reads: dict[str, _Read] = {}
        """By worker, the one that was read longest ago first."""
        self._gone: set[str] = set()
        self._looked = self._listed = float("-inf")

    def look(self) -> dict[str, Presence | None]:
        """Read what is due; return every worker's presence as if it had been read now."""
        now = self._clock.monotonic()
        passed_s, self._looked = now - self._looked, now
        for stage in self._view.stages.values():
            stage.poll_log()
        first = self._new_workers(now) + self._ended_here()
        most = _LOCAL_FILES
        if not self._is_local and self._reads:
            most = max(_LEAST_FILES, int(FILES_PER_S * min(passed_s, _LIST_S)))
        if self._is_over():
            most = 2 * len(self._reads)
        for worker in first:
            most -= self._read(worker)
        for worker in [name for name, read in self._reads.items() if not read.is_last]:
            if most <= 0:
                break
            if self._reads[worker].at < now:
                most -= self._read(worker)
        return {worker: self._aged(self._reads[worker], now) for worker in sorted(self._reads)}

    def oldest_s(self) -> float:
        """Seconds since the worker was read whose turn is next; 0 if every worker has ended."""
        turn = (read.at for read in self._reads.values() if not read.is_last)
        return max(0.0, self._clock.monotonic() - next(turn, float("inf")))

    def _new_workers(self, now: float) -> list[str]:
        if now - self._listed < (0 if self._is_local else _LIST_S):
            return []
        self._listed = now
        self._view.poll_claims()
        names = sorted(files.list_names(self._view.paths.workers))
        workers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return [worker for worker in workers if worker not in self._reads]

    def _ended_here(self) -> list[str]:
        """Workers of this host whose processes ended since they were read: finished, or dead."""
        here = (host_name(), boot_id())
        found = [
            worker
            for worker, read in self._reads.items()
            if (one := read.presence) is not None
            and (one.host, one.boot) == here
            and not read.is_last
            and worker not in self._gone
            and not process_ticks(one.pid)
        ]
        self._gone.update(found)
        return found

    def _is_over(self) -> bool:
        """Whether a worker reported that no item is pending: the last lines must be read now."""
        return all(one.complete or one.log.reported_complete for one in self._view.stages.values())

    def _read(self, worker: str) -> int:
        """Read one worker; return the number of files opened."""
        presence = self._view.presence(worker)
        read = self._view.poll_if_moved(worker, None if presence is None else presence.progress)
        # A journal is complete when it was read once more after the worker's last change.
        is_last = presence is not None and presence.state == FINISHED and not read
        self._reads.pop(worker, None)
        self._reads[worker] = _Read(presence, self._clock.monotonic(), is_last)
        return 1 + read

    @staticmethod
    def _aged(read: _Read, now: float) -> Presence | None:
        """The presence with its heartbeat as old as it was when it was read."""
        one = read.presence
        if one is None or one.state == FINISHED:
            return one
        return replace(one, at=one.at + max(0.0, now - read.at))
