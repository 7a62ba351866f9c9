"""Which unit a worker tries next: a preference, never a requirement.

The loaded group comes first. Next is the longest group of the worker's own share that no worker has
begun, estimated from its siblings (:class:`Durations`), then the longest of the other shares. Then,
where items have kinds, come groups whose next unit has the earliest kind, and of these the group
with most left. Units without groups go in order, first the worker's own share; among the first ones
are a few samples from the rest of the list, from which forecasts learn. After its share, a worker
picks at random among the first few, so that races for a name are rare.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_toolkit.queue.units import Unit

_WINDOW = 16
_UNKNOWN = 1e9
_SAMPLED = 0.05
"""Until this share of the units without groups is claimed, some are from elsewhere in the list."""
_GOLDEN = 0.6180339887
"""Multiples of the golden ratio, without their whole part, are spread evenly between 0 and 1."""
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")


# Bounded, because a campaign runs for weeks and its groups change.
@lru_cache(maxsize=1 << 14)
def siblings_key(group: str | None) -> str | None:
    """Key shared by sibling groups, whose keys differ only in their last number.

    Checkpoints of one model are an example. The shared key never equals the key of a group.
    """
    return None if group is None else "siblings " + _LAST_NUMBER.sub("#", group)


class Durations:
    """Mean seconds of one item, by group."""

    def __init__(self) -> None:
        self._means: dict[str | None, tuple[int, float]] = {}
        self._all = (0, 0.0)

    def add(self, group: str | None, items: int, seconds: float) -> None:
        if items <= 0:
            return
        for key in (None,) if group is None else (group, siblings_key(group)):
            count, total = self._means.get(key, (0, 0.0))
            self._means[key] = (count + items, total + seconds)
        self._all = (self._all[0] + items, self._all[1] + seconds)

    def seconds_of(self, group: str | None) -> float:
        """Expected seconds of an item: mean of its group, else its siblings, else all, else 1.0."""
        found = self._means.get(group) or self._means.get(siblings_key(group)) or self._all
        count, total = found
        return total / count if count else 1.0

    def precedence(self, group: str | None) -> float:
        """Weight of an item; of groups with equally many items, the greatest weight begins first.

        Groups without a known sibling come first, so that they become known in time, then groups
        with the longest items.
        """
        unknown = siblings_key(group) not in self._means
        return self.seconds_of(group) * (_UNKNOWN if unknown else 1.0)

    @property
    def known(self) -> bool:
        return self._all[0] > 0


def group_key(value: Any) -> str | None:
    """Key of a group's value, the same in every segment; None for no group."""
    return None if value is None else json.dumps(value, sort_keys=True)


class FreshUnits:
    """The units that no worker has claimed, as far as one worker knows.

    The worker's own share is one in ``world_size`` of the units without a group, and of the groups.
    """

    def __init__(self, seed: str, rank: int = 0, world_size: int = 1) -> None:
        import random  # commands that only read a run do not need it

        self._random = random.Random(seed)
        self._rank, self._world_size = rank, world_size
        self._added = 0
        self._own: deque[Unit] = deque()
        self._plain: deque[Unit] = deque()
        self._groups: dict[str, list[Unit]] = {}
        self._begun: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._next_group: str | None = None
        self._claims = 0
        lone = random.Random(f"sample {seed}").random()
        self._sample = rank * _GOLDEN if world_size > 1 else lone

    def add(self, units: Iterable[Unit], key_of: Callable[[Unit], str | None]) -> None:
        for unit in units:
            key = key_of(unit)
            if key is None:
                own = self._world_size > 1 and self._added % self._world_size == self._rank
                (self._own if own else self._plain).append(unit)
                self._added += 1
            else:
                self._groups.setdefault(key, []).append(unit)
        # Shares of equal work: large groups are dealt first, and siblings one after the other.
        new = [key for key in self._groups if key not in self._numbers]
        new.sort(key=lambda key: (-self._count(key), siblings_key(key)))
        self._numbers.update({key: len(self._numbers) + n for n, key in enumerate(new)})

    def prune(self, is_claimed: Callable[[Unit], bool]) -> None:
        self._own = deque(unit for unit in self._own if not is_claimed(unit))
        self._plain = deque(unit for unit in self._plain if not is_claimed(unit))
        for key, units in list(self._groups.items()):
            left = [unit for unit in units if not is_claimed(unit)]
            if len(left) == len(units):
                continue
            self._begun.add(key)
            if left:
                self._groups[key] = left
            else:
                del self._groups[key]

    def __bool__(self) -> bool:
        return bool(self._own or self._plain or self._groups)

    def has(self, group: str | None) -> bool:
        """Whether a unit of this group is left; False for no group."""
        return group in self._groups

    def next_group(self, loaded: str | None, weight_of: Callable[[str], float]) -> str | None:
        """The group to begin when no unit of the loaded group is left; :meth:`choose` keeps to it.

        It is of this worker's own share: all workers would prefetch a group that any of them may
        begin, and only one would use it. None if none of its own is left.
        """
        if self._next_group == loaded or not self._is_fresh(self._next_group):
            own = [key for key in self._fresh() if key != loaded and self._is_own(key)]
            self._next_group = self._random.choice(self._longest(own, weight_of)) if own else None
        return self._next_group

    def choose(
        self,
        loaded: str | None,
        weight_of: Callable[[str], float],
        kind_of: Callable[[Unit], int] = lambda _unit: 0,
    ) -> Unit | None:
        """Remove and return the unit to try next; None if none is left.

        ``weight_of``: expected seconds of one item of a group; larger if it should be begun early.
        ``kind_of``: number of a unit's kind; low numbers should be begun early.
        """
        if self._groups:
            return self._choose_group(loaded, weight_of, kind_of)
        units = self._own or self._plain
        if not units:
            return None
        index = 0 if self._own else self._random.randrange(min(_WINDOW, len(units)))
        # Items that were added later can wait.
        if self._is_sample() and units[0].entry == units[-1].entry:
            index = self._place(units)
        unit = units[index]
        del units[index]
        return unit

    def _is_sample(self) -> bool:
        """Count a claim; return whether it is to show how long the items elsewhere in a list take.

        If the list is sorted by cost, forecasts need some of its later items too.
        """
        number = self._claims * self._world_size + self._rank
        in_order = self._claims == 0 and self._rank % 2 == 0  # the list may begin with long items
        self._claims += 1
        claimed = self._added - len(self._own) - len(self._plain)
        return not in_order and max(number, claimed) < _SAMPLED * self._added

    def _place(self, units: deque[Unit]) -> int:
        """Return where in the list to claim a sample; the places of all workers lie far apart."""
        first, last = units[0], units[-1]
        self._sample += self._world_size * _GOLDEN
        at = first.first + self._sample % 1.0 * (last.first + last.count - first.first)
        return bisect_right(units, at, key=lambda unit: unit.first) - 1

    def _choose_group(
        self, loaded: str | None, weight_of: Callable[[str], float], kind_of: Callable[[Unit], int]
    ) -> Unit:
        if loaded in self._groups:
            key = loaded
        elif self._next_group is not None and self._is_fresh(self._next_group):
            key = self._next_group
        else:
            fresh = self._fresh()
            own = [key for key in fresh if self._is_own(key)]
            longest = self._longest(own or fresh or self._earliest(kind_of), weight_of)
            key = self._random.choice(longest)
        self._begun.add(key)
        unit, *left = self._groups[key]
        if left:
            self._groups[key] = left
        else:
            del self._groups[key]
        return unit

    def _is_fresh(self, key: str | None) -> bool:
        return key in self._groups and key not in self._begun

    def _fresh(self) -> list[str]:
        return [key for key in self._groups if key not in self._begun]

    def _is_own(self, key: str) -> bool:
        return self._numbers[key] % self._world_size == self._rank

    def _count(self, key: str) -> int:
        return sum(unit.count for unit in self._groups[key])

    def _longest(self, keys: list[str], weight_of: Callable[[str], float]) -> list[str]:
        """The groups with the most work left; several if they are equal."""
        weights = {key: weight_of(key) * self._count(key) for key in keys}
        longest = max(weights.values())
        return [key for key, weight in weights.items() if weight == longest]

    def _earliest(self, kind_of: Callable[[Unit], int]) -> list[str]:
        """The groups whose next unit is of the earliest kind."""
        kinds = {key: kind_of(units[0]) for key, units in self._groups.items()}
        first = min(kinds.values())
        return [key for key, kind in kinds.items() if kind == first]
