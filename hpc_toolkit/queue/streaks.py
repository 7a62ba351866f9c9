"""What went wrong on each worker since its last result: the streaks by which a sick host is told.

Times are those of the lines. Only those of one host are compared with each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 1024
DEATH_WEIGHT = 2
"""Of an executor that died: one item may kill many before it is given up."""
AGAIN_WEIGHT = 7
"""Of an item's further failures, which make a whole streak: before its last attempt is used up on
the host where the others failed, another host should try it."""


@dataclass(slots=True)
class Streak:
    """One worker's failures since its last result."""

    done_at: float = float("-inf")
    """Epoch seconds of that result."""
    hurt: dict[tuple[str, int], tuple[float, int]] = field(default_factory=dict)
    """(Unit, item) -> when it failed or killed its executor last, and the weight of all times."""


class Streaks(dict[str, Streak]):
    """The streak of every worker that wrote an attempt."""

    def of(self, worker: str) -> Streak:
        """The streak of a worker, which may be new."""
        return self.setdefault(worker, Streak())

    def done(self, worker: str, at: float) -> None:
        """A result ends the streak before it."""
        streak = self.of(worker)
        if at < streak.done_at:
            return  # of a pass that is read a second time
        streak.done_at = at
        if streak.hurt:
            streak.hurt = {item: hurt for item, hurt in streak.hurt.items() if hurt[0] > at}

    def hurt(self, worker: str, unit: str, item: int, at: float, *, died: bool) -> None:
        """An item failed, or killed its executor."""
        streak = self.of(worker)
        if at < streak.done_at:
            return
        before = streak.hurt.pop((unit, item), (0.0, 0))[1]
        weight = DEATH_WEIGHT if died else AGAIN_WEIGHT if before else 1
        streak.hurt[unit, item] = (at, before + weight)
        if len(streak.hurt) > _KEPT:
            del streak.hurt[next(iter(streak.hurt))]
