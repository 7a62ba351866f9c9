"""How long items take, learned from the passes that were read."""

from __future__ import annotations


class Durations:
    """Mean seconds of one item, by group."""

    def __init__(self) -> None:
        self._groups: dict[str | None, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def add(self, group: str | None, items: int, seconds: float) -> None:
        """Take in a pass that finished ``items`` items in ``seconds``."""
        if items <= 0:
            return
        count, total = self._groups.get(group, (0, 0.0))
        self._groups[group] = (count + items, total + seconds)
        self._all = (self._all[0] + items, self._all[1] + seconds)

    def seconds_of(self, group: str | None) -> float:
        """Expected seconds of an item: of its group, else of all items, else 1.0 (unknown)."""
        count, total = self._groups.get(group, self._all)
        return total / count if count else 1.0

    @property
    def known(self) -> bool:
        """Whether anything was learned."""
        return self._all[0] > 0
