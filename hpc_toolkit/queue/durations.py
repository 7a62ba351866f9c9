"""How long items take, learned from the passes that were read."""

from __future__ import annotations

import re
from functools import lru_cache

_UNKNOWN = 1e9
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


# Bounded: a campaign goes on for weeks, and its groups change.
@lru_cache(maxsize=1 << 14)
def kin(group: str | None) -> str | None:
    """What a group's key has in common with those that differ from it in the last number alone, as
    the checkpoints of one model do; another thing than any key."""
    return None if group is None else "kin " + _LAST_NUMBER.sub("#", group)


class Durations:
    """Mean seconds of one item, by group."""

    def __init__(self) -> None:
        self._means: dict[str | None, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def add(self, group: str | None, items: int, seconds: float) -> None:
        """Take in a pass that finished ``items`` items in ``seconds``."""
        if items <= 0:
            return
        for key in {group, kin(group)}:
            count, total = self._means.get(key, (0, 0.0))
            self._means[key] = (count + items, total + seconds)
        self._all = (self._all[0] + items, self._all[1] + seconds)

    def seconds_of(self, group: str | None) -> float:
        """Expected seconds of an item: of its group, else of the group's kin, else of all items,
        else 1.0 (unknown)."""
        found = self._means.get(group) or self._means.get(kin(group)) or self._all
        count, total = found
        return total / count if count else 1.0

    def precedence(self, group: str | None) -> float:
        """By what groups of as many items are begun, the greatest first: those of which nothing is
        known, to be known in time, then those that take longest."""
        unknown = kin(group) not in self._means
        return self.seconds_of(group) * (_UNKNOWN if unknown else 1.0)

    @property
    def known(self) -> bool:
        """Whether anything was learned."""
        return self._all[0] > 0
