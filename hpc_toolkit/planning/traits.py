"""Traits that distinguish items before they run: their group, a word, and a number."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpc_toolkit.planning.repeats import repeats
from hpc_toolkit.queue.affinity import siblings_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.repeats import Floats, Ints, Repeats
    from hpc_toolkit.planning.work import StageWork
    from hpc_toolkit.queue.items import Item

_PARTS = 16
"""Into how many equal parts a list without groups is divided."""
_EACH = 4
"""Fewest seen items between two further cuts, where more were seen than in the rest of the list."""
_MOST_WORDS = 100
_FEWEST = 12
"""Number of items that must have ended before any of their keys can count as relevant."""
_GAIN = 0.3
"""Least share of the variance that a word must explain."""
_SLOPE_GAIN = 0.1
"""Least share of the variance that a number must explain."""
_BEYOND = 0.5
"""Least distance, in logarithms, between the means of the items left and of the seen items at which
a list counts as sorted by a number."""
_NEAR = 1.5
"""Factor by which a key may leave more variance unexplained than the best key."""
_SIGMAS = 3.5
"""Least distance of a number's slope from zero, in standard errors."""

_SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,6}(?:\.\d{1,6})?)([kmb])(?![a-z0-9])", re.IGNORECASE)
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True, slots=True)
class Traits:
    """Traits of items as arrays, the seen items first."""

    group: Ints
    """For each item, the index of its group in :attr:`groups`."""
    groups: tuple[str, ...]
    siblings: Ints
    """For each group, the index of its set of sibling groups."""
    kins: int
    word: Ints
    """For each item, the index of its value under the key that separates kinds; else all 0."""
    words: int
    numbers: tuple[Floats, ...]
    """For each candidate key, the centred logarithm of each item's number, with which its length
    grows; each draw uses the best key."""
    repeats: Repeats
    part: Ints | None
    """For each item, the part of a list without groups in which it is; None if places are not
    known."""
    middles: Floats
    """For each part, where in the list its middle is, from 0 to 1."""
    seen: int
    """Number of seen items."""
    keys: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.group)


def traits(stage: StageWork, z: Floats) -> Traits:
    """Return the traits of the seen items, followed by those of the items left.

    ``z`` is the logarithm of the seconds of each seen item.
    """
    items = [one.item for one in stage.seen] + list(stage.left)
    keys = [one.group for one in stage.seen] + [stage.group_of(item) for item in stage.left]
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    families = {key: str(siblings_key(key)) for key in numbers}
    family = {name: n for n, name in enumerate(dict.fromkeys(families.values()))}
    _, raw = _word(items, z, stage.group_by)
    again = repeats(stage, z, raw[: len(z)])
    plain = z - _centre(z, again.first[: len(z)])
    word_key, word = _word(items, plain, stage.group_by)
    centred = plain - _centre(plain, word[: len(z)])
    numeric = _numbers(items, centred)
    part, middles = _parts(stage)
    return Traits(
        group=np.array([numbers[key] for key in keys], dtype=np.int64),
        groups=tuple(numbers),
        siblings=np.array([family[families[key]] for key in numbers], dtype=np.int64),
        kins=len(family),
        word=word,
        words=int(word.max(initial=0)) + 1,
        numbers=tuple(numeric.values()),
        repeats=again,
        part=part,
        middles=middles,
        seen=len(z),
        keys=tuple(key for key in (word_key, *numeric) if key),
    )


def _parts(stage: StageWork) -> tuple[Ints | None, Floats]:
    """Return the part of the list in which each item is, and the middle of each part, as a share of
    the list; None if the place of any item is not known.

    The list is cut into equal parts, and again after every few seen items: if it begins with the
    longest items, the first part holds very different ones, many of which were seen.
    """
    places = [one.place for one in stage.seen]
    for one in stage.batches:
        places += [None] if one.place is None else range(one.place, one.place + one.count)
    if None in places:
        return None, np.empty(0)
    found = np.array(places, dtype=np.int64)
    size = int(found.max()) + 1
    seen = np.sort(found[: len(stage.seen)])
    each = max(_EACH, math.ceil(len(seen) / _PARTS))
    ends = np.arange(each, len(seen) - _EACH + 1, each)
    between = (seen[ends - 1] + seen[ends] + 1) // 2
    cuts = np.union1d(np.arange(1, _PARTS) * size // _PARTS, between)
    edges = np.concatenate([[0], cuts, [size]]) / size
    return np.searchsorted(cuts, found, side="right"), (edges[:-1] + edges[1:]) / 2


def _centre(z: Floats, of: Ints) -> Floats:
    if not len(z):
        return z
    count = np.maximum(np.bincount(of), 1)
    return (np.bincount(of, z) / count)[of]


def _word(items: Sequence[Item], z: Floats, group_by: str | None) -> tuple[str, Ints]:
    """Return the text key that explains most variance, or "", and each item's value as an index."""
    best, chosen = _GAIN, ("", np.zeros(len(items), dtype=np.int64))
    if len(z) < _FEWEST:
        return chosen
    for key in sorted({key for key, value in items[0].items() if isinstance(value, str)}):
        values = [str(item.get(key)) for item in items]
        known = {value: n for n, value in enumerate(dict.fromkeys(values))}
        if key == group_by or not 1 < len(known) <= min(_MOST_WORDS, len(z) // 3):
            continue
        of = np.array([known[value] for value in values], dtype=np.int64)
        free = len(z) - len(np.unique(of[: len(z)]))
        rest = float(np.sum((z - _centre(z, of[: len(z)])) ** 2)) / max(free, 1)
        gain = 1.0 - rest / max(float(np.var(z, ddof=1)), 1e-12)
        if gain > best:
            best, chosen = gain, (key, of)
    return chosen


def _numbers(items: Sequence[Item], z: Floats) -> dict[str, Floats]:
    """Return, by key, the numbers that explain the lengths nearly as well as the best one."""
    found: dict[str, tuple[float, Floats]] = {}
    if len(z) < _FEWEST or float(np.std(z)) == 0.0:
        return {}
    near = tamed(z)
    for key in sorted(items[0]):
        x = _logarithms(items, key)
        if x is None:
            continue
        known, ahead = x[: len(z)], x[len(z) :]
        same = float(np.std(known)) == 0.0
        r = 0.0 if same else float(np.corrcoef(known, near)[0, 1])
        sure = abs(r) * np.sqrt((len(z) - 2) / max(1.0 - r * r, 1e-12))
        # If the list is sorted by this number, the seen range may be too narrow to show a slope.
        beyond = abs(float(ahead.mean() - known.mean())) > max(_BEYOND, 2 * float(np.std(known)))
        if (r * r > _SLOPE_GAIN and sure > _SIGMAS) or beyond:
            found[key] = r * r, x - float(known.mean())
    best = max((gain for gain, _ in found.values()), default=0.0)
    # Compare the unexplained parts: 0.99 is far better than 0.9.
    return {key: x for key, (gain, x) in found.items() if 1 - gain < _NEAR * (1 - best) + 1e-6}


def tamed(z: Floats) -> Floats:
    """Clip the extremes: a few items that take ten times as long would hide any slope."""
    middle = float(np.median(z))
    reach = 3.0 * 1.4826 * float(np.median(np.abs(z - middle)))
    return np.clip(z, middle - reach, middle + reach) if reach else z


def _sized(value: object) -> object:
    """Return the size in a name such as pythia-1.4b, else None; other values are unchanged."""
    if not isinstance(value, str):
        return value
    found = _SIZE.search(value)
    return float(found[1]) * _UNITS[found[2].lower()] if found else None


def _logarithms(items: Sequence[Item], key: str) -> Floats | None:
    """Return the logarithm of each item's number under ``key``.

    None if an item has no number, or if the numbers look like a counter or a seed.
    """
    values = [_sized(item.get(key)) for item in items]
    if not all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300
        for value in values
    ):
        return None
    x = np.array(values, dtype=np.float64)
    if len(np.unique(x)) == len(x) and float(np.ptp(x)) < 1.2 * len(x):
        return None  # a counter or a seed says nothing about the work
    # If a number is 0, add the smallest positive one to all, which suits numbers of any unit.
    least = float(x[x > 0].min(initial=1.0))
    return np.log(x + (least if (x == 0).any() else 0.0))
