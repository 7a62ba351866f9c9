"""How long items take, learned from the passes that were read."""

from __future__ import annotations

import re
from functools import lru_cache

_UNKNOWN = 1e9
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


# Bounded, because a campaign runs for weeks and its groups change.
@lru_cache(maxsize=1 << 14)
def kin(group: str | None) -> str | None:
    """Key shared by sibling groups, whose keys differ only in their last number.

    Checkpoints of one model are an example. The shared key never equals the key of a group.
    """
    return None if group is None else "kin " + _LAST_NUMBER.sub("#", group)


class Durations:
    """Mean seconds of one item, by group."""

    def __init__(self) -> None:
        self._means: dict[str | None, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def add(self, group: str | None, items: int, seconds: float) -> None:
        """Add a pass that finished ``items`` items in ``seconds``."""
        if items <= 0:
            return
        for key in {group, kin(group)}:
            count, total = self._means.get(key, (0, 0.0))
            self._means[key] = (count + items, total + seconds)
        self._all = (self._all[0] + items, self._all[1] + seconds)

    def seconds_of(self, group: str | None) -> float:
        """Expected seconds of an item: mean of its group, else its siblings, else all, else 1.0."""
        found = self._means.get(group) or self._means.get(kin(group)) or self._all
        count, total = found
        return total / count if count else 1.0

    def precedence(self, group: str | None) -> float:
        """Weight of an item; of groups with equally many items, the greatest weight begins first.

        Groups without a known sibling come first, so that they become known in time, then groups
        with the longest items.
        """
        unknown = kin(group) not in self._means
        return self.seconds_of(group) * (_UNKNOWN if unknown else 1.0)

    @property
    def known(self) -> bool:
        """Whether any duration was learned."""
        return self._all[0] > 0
