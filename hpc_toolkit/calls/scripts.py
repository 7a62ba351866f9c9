"""The scripts that use a run of calls: which live, and calls of earlier code that none needs."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.queue.claims import Claims
from hpc_toolkit.queue.leases import DEFAULT_LEASE_S
from hpc_toolkit.rundir.files import list_names, read_fresh, write_new
from hpc_toolkit.rundir.journal import encode_line, release_line
from hpc_toolkit.rundir.layout import WITHDRAWN
from hpc_toolkit.rundir.trust import share
from hpc_toolkit.system.clock import SystemClock
from hpc_toolkit.system.ranks import RankInfo, boot_id, host_name, process_ticks
from hpc_toolkit.worker.membership import Counts, Membership

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from hpc_toolkit.rundir.layout import RunPaths, StagePaths

BEAT_S = 30.0
_SILENT_S = 4 * BEAT_S
_SUFFIX = ".script"


class Presence:
    """The file that shows that an executor of this process uses a run."""

    def __init__(self, calls: Path) -> None:
        self._path = calls / f"{os.urandom(8).hex()}{_SUFFIX}"
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Create the file, or set its time again; to be called at least every 30 s."""
        now = time.monotonic()
        if now < self._beat_at + BEAT_S / 2:
            return
        if self._beat_at < 0:
            self._path.parent.mkdir(exist_ok=True)
            share(self._path.parent)
            one = [host_name(), boot_id(), os.getpid(), process_ticks(os.getpid())]
            write_new(self._path, [json.dumps(one).encode()])
        os.utime(self._path)
        self._beat_at = now

    def is_alone(self) -> bool:
        """Whether no other executor seems to use the run."""
        os.utime(self._path)
        # Of both files the time is the file server's.
        now, own = self._path.stat().st_mtime, [host_name(), boot_id()]
        for path in (self._path.parent / name for name in list_names(self._path.parent)):
            if path.suffix == _SUFFIX and path != self._path:
                with suppress(OSError, ValueError):
                    *where, pid, ticks = json.loads(read_fresh(path))
                    silent_s = now - path.stat().st_mtime
                    lives = process_ticks(pid) == ticks if where == own else silent_s < _SILENT_S
                    if lives:
                        return False
        return True

    def leave(self) -> None:
        with suppress(OSError):
            self._path.unlink()


def withdraw(
    paths: RunPaths, stage: StagePaths, places: Iterable[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Fail calls in units that no worker has claimed; return their units and positions.

    This claims the units as a worker does, so no worker can start them at the same time.
    """
    claims = Claims(stage)
    claims.refresh()
    units: dict[str, list[int]] = {}
    for unit, item in places:
        if not claims.generation(unit):
            units.setdefault(unit, []).append(item)
    if not units:
        return []
    clock, ended = SystemClock(), list[tuple[str, int]]()
    member = Membership(paths, RankInfo(), clock, DEFAULT_LEASE_S, prefix=WITHDRAWN)
    facts = {"error": "not started: its function changed", "seconds": 0.0}
    for unit, items in units.items():
        if claims.create(unit, 1, member.name):
            named = {"unit": f"{stage.name}/{unit}", "generation": 1, "at": round(clock.wall(), 3)}
            each = ({"type": "permanent", **named, "item": item, **facts} for item in items)
            lines, start = b"".join(map(encode_line, each)), member.journal.size
            counts = {"lines": len(items), "done": 0, "failed": len(items), "seconds": 0.0}
            member.journal.append(lines + release_line(start, lines, **named, **counts))
            ended += [(unit, item) for item in items]
    member.finish(Counts(0, len(ended), 0), "calls whose function changed")
    member.journal.close()
    member.lock.release()
    return ended
