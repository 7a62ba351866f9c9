"""How the workers of a run ended, and how far the clocks of their hosts are off."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.results.records import ALIVE, DIED, DRAINED, ENDED, UNKNOWN_END

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.rundir.layout import RunPaths

_NEAR_S = 120.0
"""Clocks that differ by less are not reported: a busy file server writes a heartbeat late."""


def end_of(name: str, presence: Presence | None, alive: set[str]) -> str:
    """How a worker ended: ``alive``, ``finished``, ``drained``, ``died`` or ``unknown``."""
    if presence is None:
        return UNKNOWN_END
    if presence.state == FINISHED:
        return DRAINED if presence.note else ENDED
    return ALIVE if name in alive else DIED


def clocks_ahead(paths: RunPaths, presences: Mapping[str, Presence | None]) -> dict[str, float]:
    """Seconds by which the clocks of hosts are ahead of the file server's; negative: behind.

    A heartbeat has the time of its host, and its file that of the file server. Empty if the times
    of the files mean nothing, as in a copy of the run.
    """
    lives = [one for one in presences.values() if one is not None and one.started]
    ahead: dict[str, float] = {}
    with suppress(OSError):
        for one in lives:
            late = one.at - paths.worker(one.worker).stat().st_mtime
            # A delayed write makes a clock look as if it was behind.
            ahead[one.host] = max(late, ahead.get(one.host, late))
        created = paths.manifest.stat().st_mtime
        first = min((one.started - ahead[one.host] for one in lives), default=created)
        near = sum(abs(late) < _NEAR_S for late in ahead.values())
        if first > created - _NEAR_S and 2 * near >= len(ahead):
            return {host: late for host, late in ahead.items() if abs(late) >= _NEAR_S}
    return {}
