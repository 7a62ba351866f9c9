"""A worker's watch over the other workers of its run: who died, and how many live."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import TYPE_CHECKING

from hpc_toolkit.queue.pacing import NAMES_EVERY

if TYPE_CHECKING:
    from hpc_toolkit.queue.leases import Liveness, Verdict

_MOST_SILENT = 8
"""Silent workers past which one look around the ring goes."""


@lru_cache(maxsize=1 << 14)
def _on_ring(worker: str) -> float:
    """A worker's position on a ring of length 1.

    Workers of one host, whose names are alike, must not be neighbors: they die together. A CRC
    puts similar names side by side.
    """
    return random.Random(worker).random()


class Watch:
    """Looks at all other workers, or at some if the filesystem is shared with many.

    Then each worker looks at the next one on the ring of all names. Only a worker that looks twice
    can see a silence, so every worker needs another one that always looks at it.
    """

    def __init__(self, liveness: Liveness, worker: str) -> None:
        self.liveness, self.worker = liveness, worker
        self._random = random.Random(worker)
        self._ring: list[str] = []
        """All known workers, in the order of the ring from this worker on."""
        self._looks = 0
        self._gone: set[str] = set()
        self._watched: dict[str, int | None] = {}
        self.living = 0
        """Workers alive at the last look; an estimate if some were skipped."""
        self.lease_left_s = math.inf
        """Seconds until the first silent worker counts as dead; infinite if none is silent."""

    def look(self, at_most: int | None = None) -> list[str]:
        """Return the workers that died since the last look; count the living ones.

        ``at_most``: look at this many workers, and past silent ones on the ring.
        """
        lists = self._looks % NAMES_EVERY == 0
        self._looks += 1
        if lists or at_most is None or at_most >= len(self._ring):
            own = _on_ring(self.worker)
            names = self.liveness.names()
            self._ring = sorted(names, key=lambda name: (_on_ring(name) - own) % 1.0)
        if at_most is None or at_most >= len(self._ring):
            looked = {name: self.liveness.verdict(name) for name in self._ring}
        else:
            looked = self._look_at_next(again=lists)
            for name in self._some(looked, max(0, at_most - len(looked))):
                looked[name] = self.liveness.verdict(name)
        alive = {name for name, verdict in looked.items() if verdict.alive}
        left = {name for name, verdict in looked.items() if verdict.finished} | alive
        died = [name for name in looked if name not in left | self._gone]
        self._gone.difference_update(alive)  # they were silent but not dead
        self._gone.update(died)
        self.lease_left_s = min(map(self.liveness.lease_left_s, alive), default=math.inf)
        self.living = self._estimate(len(alive), len(looked))
        return died

    def _look_at_next(self, *, again: bool) -> dict[str, Verdict]:
        """Look at the next workers on the ring, up to the first one that is not silent.

        ``again``: look at those that counted as dead too.
        """
        looked: dict[str, Verdict] = {}
        for name in self._ring:
            skipped = name in self._gone and not again
            if name == self.worker or skipped or self.liveness.is_final(name):
                continue
            looked[name] = verdict = self.liveness.verdict(name)
            heard = verdict.alive and math.isinf(self.liveness.lease_left_s(name))
            if heard or len(looked) == _MOST_SILENT:
                break
        return looked

    def _some(self, looked: dict[str, Verdict], count: int) -> list[str]:
        """Workers without a heartbeat between the last two looks, and others at random."""
        heartbeat, final = self.liveness.heartbeat, self.liveness.is_final
        kept = {
            name: heartbeat(name)
            for name, beat in self._watched.items()
            # None: after a single look it is unknown whether the worker is silent.
            if name not in self._gone and not final(name) and beat in (None, heartbeat(name))
            if name not in looked
        }
        unseen = (name for name in self._ring if name not in self._watched and name not in looked)
        others = [name for name in unseen if not final(name)]
        new = self._random.sample(others, min(len(others), max(0, count - len(kept))))
        self._watched = dict(list(kept.items())[:count]) | dict.fromkeys(new)
        return list(self._watched)

    def _estimate(self, alive: int, looked: int) -> int:
        if looked == len(self._ring):
            return alive
        left = {name for name in self._ring if not self.liveness.is_final(name)}
        return round(len(left - self._gone) * (alive + 1) / (looked + 1))
