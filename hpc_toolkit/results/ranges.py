"""The least, the median and the most of each number in the results of a stage."""

from __future__ import annotations

import math
from array import array
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hpc_toolkit.results.tables import Row


class Range:
    """The values of one result."""

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
