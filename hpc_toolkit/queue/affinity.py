"""Which unit next: a preference, never a requirement.

The group that is loaded comes first; then the longest group that nobody began, by what its kin took
(:mod:`hpc_toolkit.queue.durations`), of several as long one of the worker's own share; then, where
items have kinds, a group whose next unit is of the earliest kind; then the group with most left.
Units without groups go in their order, each worker picking at random among the first few, so that
workers seldom race for one name.
"""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hpc_toolkit.queue.units import Unit

_WINDOW = 16


def group_key(value: Any) -> str | None:
    """A key for a group's value that is the same in every segment; None for no group."""
    return None if value is None else json.dumps(value, sort_keys=True)


class FreshUnits:
    """The units that nobody claimed, as far as one worker knows.

    Args:
        seed: of its chances.
        place: (rank, world_size) of the worker; of so many units without a group, and of so many
            groups, one is of its own share.
    """

    def __init__(self, seed: str, place: tuple[int, int] = (0, 1)) -> None:
        import random  # reading a run needs no chance

        self._random = random.Random(seed)
        self._rank, self._world_size = place
        self._added = 0
        self._own: deque[Unit] = deque()
        self._plain: deque[Unit] = deque()
        self._groups: dict[str, deque[Unit]] = {}
        self._begun: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._ahead: str | None = None

    def add(self, units: Iterable[Unit], key_of: Callable[[Unit], str | None]) -> None:
        """Take in new units in their order."""
        for unit in units:
            key = key_of(unit)
            if key is None:
                own = self._world_size > 1 and self._added % self._world_size == self._rank
                (self._own if own else self._plain).append(unit)
                self._added += 1
            else:
                self._groups.setdefault(key, deque()).append(unit)
                self._numbers.setdefault(key, len(self._numbers))

    def prune(self, is_claimed: Callable[[Unit], bool]) -> None:
        """Forget the units that somebody claimed."""
        self._own = deque(unit for unit in self._own if not is_claimed(unit))
        self._plain = deque(unit for unit in self._plain if not is_claimed(unit))
        for key, units in list(self._groups.items()):
            left = deque(unit for unit in units if not is_claimed(unit))
            if len(left) < len(units):
                self._begun.add(key)
            if left:
                self._groups[key] = left
            else:
                del self._groups[key]

    def has(self, group: str | None) -> bool:
        """Whether a unit of this group is left; False for no group."""
        return group in self._groups

    def ahead(self, loaded: str | None, weight_of: Callable[[str], float]) -> str | None:
        """The group to begin when no unit of the loaded one is left; :meth:`choose` keeps to it.

        One of this worker's own share alone: what all workers are as likely to begin, all would
        prefetch, and one would use. None where there is none, or it is not among the longest.
        """
        if self._ahead == loaded or not self._is_fresh(self._ahead):
            fresh = [key for key in self._groups if key != loaded and self._is_fresh(key)]
            some = any(map(self._is_own, fresh))
            longest = self._longest(fresh, weight_of) if some else []
            own = [key for key in longest if self._is_own(key)]
            self._ahead = self._random.choice(own) if own else None
        return self._ahead

    def choose(
        self,
        loaded: str | None,
        weight_of: Callable[[str], float],
        kind_of: Callable[[Unit], int] = lambda _unit: 0,
    ) -> Unit | None:
        """Take out the unit to try next; None if none is left.

        Args:
            loaded: key of the group whose context is loaded.
            weight_of: of one item of a group: what it takes, or more for what should come early.
            kind_of: number of a unit's kind; low ones should be begun early.
        """
        if self._groups:
            return self._choose_group(loaded, weight_of, kind_of)
        if self._own:
            return self._own.popleft()
        if not self._plain:
            return None
        index = self._random.randrange(min(_WINDOW, len(self._plain)))
        unit = self._plain[index]
        del self._plain[index]
        return unit

    def _choose_group(
        self,
        loaded: str | None,
        weight_of: Callable[[str], float],
        kind_of: Callable[[Unit], int],
    ) -> Unit:
        if loaded in self._groups:
            key = loaded
        elif self._ahead is not None and self._is_fresh(self._ahead):
            key = self._ahead
        else:
            fresh = [key for key in self._groups if self._is_fresh(key)]
            longest = self._longest(fresh or self._earliest(kind_of), weight_of)
            own = [key for key in longest if self._is_own(key)] if fresh else []
            key = self._random.choice(own or longest)
        units = self._groups[key]
        self._begun.add(key)
        unit = units.popleft()
        if not units:
            del self._groups[key]
        return unit

    def _is_fresh(self, key: str | None) -> bool:
        """Whether nobody began a group, as far as is known."""
        return key in self._groups and key not in self._begun

    def _is_own(self, key: str) -> bool:
        return self._numbers[key] % self._world_size == self._rank

    def _longest(self, keys: list[str], weight_of: Callable[[str], float]) -> list[str]:
        """Those with the most left to do, several where it is as much."""
        weights = {key: weight_of(key) * sum(u.count for u in self._groups[key]) for key in keys}
        longest = max(weights.values())
        return [key for key, weight in weights.items() if weight == longest]

    def _earliest(self, kind_of: Callable[[Unit], int]) -> list[str]:
        """The groups whose next unit is of the earliest kind."""
        kinds = {key: kind_of(units[0]) for key, units in self._groups.items()}
        first = min(kinds.values())
        return [key for key, kind in kinds.items() if kind == first]
