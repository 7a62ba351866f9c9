"""Failures of each worker since its last result, called streaks; they reveal a sick host.

Times come from journal lines. Only times of one host are compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 1024
DEATH_WEIGHT = 2
"""Weight of a dead executor: one item may kill many executors before it is given up."""
AGAIN_WEIGHT = 7
"""Weight of a repeated failure of an item: with the first one, it makes a complete streak.

So another host is asked to try the item before its last attempt is used up on the same host.
"""


@dataclass(slots=True)
class Streak:
    """One worker's failures since its last result."""

    done_at: float = float("-inf")
    """Epoch seconds of that result."""
    hurt: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """(Unit, item) -> when it last failed or killed its executor, and the weight of all times."""


class Streaks(dict[str, Streak]):
    """The streak of every worker that wrote an attempt."""

    def of(self, worker: str) -> Streak:
        """The streak of a worker; created if the worker is new."""
        return self.setdefault(worker, Streak())

    def done(self, worker: str, at: float) -> None:
        """Record a result, which ends the streak before it."""
        streak = self.of(worker)
        if at < streak.done_at:
            return  # a pass is being read a second time
        streak.done_at = at
        if streak.hurt:
            streak.hurt = {item: hurt for item, hurt in streak.hurt.items() if hurt[0] > at}

    def hurt(self, worker: str, unit: str, item: int, at: float, *, died: bool) -> None:
        """Record that an item failed or killed its executor."""
        streak = self.of(worker)
        if at < streak.done_at:
            return
        before = streak.hurt.pop((unit, item), (0.0, 0))[1]
        weight = DEATH_WEIGHT if died else AGAIN_WEIGHT if before else 1
        streak.hurt[unit, item] = (at, before + weight)
        if len(streak.hurt) > _KEPT:
            del streak.hurt[next(iter(streak.hurt))]
