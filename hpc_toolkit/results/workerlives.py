"""How the workers of a run ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_toolkit.queue.presence import FINISHED
from hpc_toolkit.results.records import ALIVE, DIED, DRAINED, ENDED, UNKNOWN_END

if TYPE_CHECKING:
    from hpc_toolkit.queue.presence import Presence


def end_of(name: str, presence: Presence | None, alive: set[str]) -> str:
    """How a worker ended: ``alive``, ``finished``, ``drained``, ``died`` or ``unknown``."""
    if presence is None:
        return UNKNOWN_END
    if presence.state == FINISHED:
        return DRAINED if presence.note else ENDED
    return ALIVE if name in alive else DIED
