"""How the workers of a run ended, and how far the clocks of their hosts are off."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.results.records import ALIVE, DIED, DRAINED, ENDED, UNKNOWN_END
from hpc_toolkit.system.record import replace

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence
    from hpc_toolkit.results.history import History

_NEAR_S = 120.0
"""Clocks that differ by less are not reported: a busy file server writes a heartbeat late."""


def end_of(name: str, presence: Presence | None, alive: set[str]) -> str:
    """How a worker ended: ``alive``, ``finished``, ``drained``, ``died`` or ``unknown``."""
    if presence is None:
        return UNKNOWN_END
    if presence.state == FINISHED:
        return DRAINED if presence.note else ENDED
    return ALIVE if name in alive else DIED


def corrected(one: Presence, ahead: dict[str, float]) -> Presence:
    late = ahead.get(one.host, 0.0)
    return replace(one, started=one.started - late, at=one.at - late) if late else one


def clocks_ahead(history: History) -> dict[str, float]:
    """Seconds by which the clocks of hosts are ahead of the file server's; negative: behind.

    A heartbeat and the last line of a journal have the time of their host, and both files that of
    the file server. Two files of a host must agree, since one can be restored or touched. Empty if
    the times of the files mean nothing, as in a copy of the run.
    """
    paths = history.view.paths
    started: dict[str, float] = {}
    late: dict[str, list[float]] = {}
    for one in history.presences.values():
        if one is not None and one.started:
            started[one.host] = min(one.started, started.get(one.host, one.started))
            files = ((paths.worker, one.at), (paths.journal, history.last_line_at(one.worker)))
            for path, at in files:
                with suppress(OSError):
                    written = path(one.worker).stat().st_mtime
                    if at is not None:
                        late.setdefault(one.host, []).append(at - written)
    # A delayed write makes a clock look as if it was behind.
    highest = {host: max(found) for host, found in late.items()}
    ahead = {
        host: most
        for host, most in highest.items()
        if sum(one > most - _NEAR_S for one in late[host]) > 1
    }
    with suppress(OSError):
        created = paths.manifest.stat().st_mtime
        first = min((started[host] - off for host, off in ahead.items()), default=created)
        near = sum(abs(off) < _NEAR_S for off in ahead.values())
        if first > created - _NEAR_S and 2 * near >= len(ahead):
            return {host: off for host, off in ahead.items() if abs(off) >= _NEAR_S}
    return {}
