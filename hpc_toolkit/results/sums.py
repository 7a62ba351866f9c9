"""Durations of attempts and numbers in results, summed up in bounded memory for a report."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc_toolkit.results.tables import Row


_PER_DECADE = 60
ACCURACY = 10 ** (0.5 / _PER_DECADE) - 1
"""Largest relative error of a quantile, because durations are counted in classes."""
_LEAST_S = 1e-6
_GROUP_CHARS = 120


@dataclass(slots=True)
class Durations:
    count: int = 0
    total_s: float = 0.0
    least_s: float = math.inf
    most_s: float = 0.0
    classes: dict[int, int] = field(default_factory=dict)
    """Number of durations by their logarithm."""

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.least_s, self.most_s = min(self.least_s, seconds), max(self.most_s, seconds)
        key = math.floor(math.log10(max(seconds, _LEAST_S)) * _PER_DECADE)
        self.classes[key] = self.classes.get(key, 0) + 1

    def quantile(self, share: float) -> float:
        """A duration that is longer than this share of them; 0 without any."""
        rank, seen = share * self.count, 0
        for key in sorted(self.classes):
            seen += self.classes[key]
            if seen >= rank:
                middle = 10 ** ((key + 0.5) / _PER_DECADE)
                return min(max(middle, self.least_s), self.most_s)
        return self.most_s


def group_name(group: Any) -> str:
    """A group as people read it, shortened; "" without groups."""
    if group is None:
        return ""
    text = group if isinstance(group, str) else json.dumps(group, ensure_ascii=False)
    return text if len(text) <= _GROUP_CHARS else f"{text[: _GROUP_CHARS - 3]}..."


class Range:
    def __init__(self) -> None:
        self.count, self.least, self.most = 0, math.inf, -math.inf
        self.some = array("d")
        """Every value; of more than 131,072 those at equal distances."""
        self._every = 1

    def add(self, value: float) -> None:
        if self.count % self._every == 0:
            self.some.append(value)
            if len(self.some) > 1 << 17:
                self.some, self._every = self.some[::2], 2 * self._every
        self.count += 1
        self.least, self.most = min(self.least, value), max(self.most, value)


def ranges_of(rows: Iterable[Row], *, most: int) -> dict[str, Range]:
    """The range of each number, by its name; of very many names, of the first ``most``."""
    found: dict[str, Range] = {}
    for row in rows:
        whole = row["value"]
        for name, value in _numbers(whole if isinstance(whole, dict) else {"value": whole}):
            if name not in found and len(found) < most:
                found[name] = Range()
            if name in found:
                found[name].add(value)
    return found


def _numbers(value: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a result, those in objects with the keys that lead to them."""
    for key, one in value.items():
        if isinstance(one, dict):
            yield from _numbers(one, f"{before}{key}.")
        elif isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < math.inf:
            with suppress(OverflowError):
                yield f"{before}{key}", float(one)
