"""What tells items apart before they run: their group, a word, and a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.queue.durations import kin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.plan.work import StageWork
    from hpc_toolkit.queue.items import Item

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

_MOST_WORDS = 100
_FEWEST = 12
"""Items that must have ended before a key of theirs is believed to matter."""
_GAIN = 0.3
"""Share of the variance that a key must take away, at least."""
_SIGMAS = 4.0
"""How far its slope must be from zero, in standard errors."""


@dataclass(frozen=True, slots=True)
class Traits:
    """Numbers for items, those that were seen first."""

    group: Ints
    """Of each item, into :attr:`groups`."""
    groups: tuple[str, ...]
    kin: Ints
    """Of each group."""
    kins: int
    """How many there are."""
    word: Ints
    """Of each item: which value a key has that tells kinds apart; all 0 without such a key."""
    words: int
    number: Floats
    """Of each item: the logarithm of a number that its length grows with; all 0 without one."""
    first: Ints
    """Of each item: 1 if it is the first after a load, where that matters."""
    keys: tuple[str, ...]
    """The keys that were found to matter."""

    def __len__(self) -> int:
        return len(self.group)


def traits(stage: StageWork, z: Floats) -> Traits:
    """Of the items that were seen, then of those left.

    Args:
        stage: the items.
        z: logarithm of the seconds of each that was seen.
    """
    items = [one.item for one in stage.seen] + list(stage.left)
    keys = [one.group for one in stage.seen] + [stage.group_of(item) for item in stage.left]
    numbers = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    families = {key: str(kin(key)) for key in numbers}
    family = {name: n for n, name in enumerate(dict.fromkeys(families.values()))}
    first = _firsts(stage, z)
    plain = z - _centre(z, first)
    word_key, word = _word(items, plain, stage.group_by)
    centred = plain - _centre(plain, word[: len(z)])
    number_key, number = _number(items, centred)
    return Traits(
        group=np.array([numbers[key] for key in keys], dtype=np.int64),
        groups=tuple(numbers),
        kin=np.array([family[families[key]] for key in numbers], dtype=np.int64),
        kins=len(family),
        word=word,
        words=int(word.max(initial=0)) + 1,
        number=number,
        first=np.concatenate([first, np.zeros(len(stage.left), dtype=np.int64)]),
        keys=tuple(key for key in (word_key, number_key) if key),
    )


def _centre(z: Floats, of: Ints) -> Floats:
    """The mean of those that are of the same kind, of each."""
    if not len(z):
        return z
    count = np.maximum(np.bincount(of), 1)
    means: Floats = (np.bincount(of, z) / count)[of]
    return means


def _firsts(stage: StageWork, z: Floats) -> Ints:
    """Which items pay for their group, as where the first of a checkpoint makes its pass over the
    texts; none unless they take far longer than the others."""
    first = np.array([one.first for one in stage.seen], dtype=np.int64)
    if min(int(first.sum()), len(first) - int(first.sum())) < 3:
        return np.zeros(len(first), dtype=np.int64)
    far = np.median(z[first == 1]) - np.median(z[first == 0]) > np.log(1.5)
    return first if far else np.zeros(len(first), dtype=np.int64)


def _word(items: Sequence[Item], z: Floats, group_by: str | None) -> tuple[str, Ints]:
    """The key whose few texts explain most of the differences; "" where none does."""
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


def _number(items: Sequence[Item], z: Floats) -> tuple[str, Floats]:
    """The key with whose number the length grows or falls; "" where none is."""
    best, chosen = _GAIN, ("", np.zeros(len(items)))
    if len(z) < _FEWEST or float(np.std(z)) == 0.0:
        return chosen
    for key in sorted(items[0]):
        x = _logarithms(items, key)
        if x is None or float(np.std(x[: len(z)])) == 0.0:
            continue
        r = float(np.corrcoef(x[: len(z)], z)[0, 1])
        sure = abs(r) * np.sqrt((len(z) - 2) / max(1.0 - r * r, 1e-12))
        if r * r > best and sure > _SIGMAS:
            best, chosen = r * r, (key, x - float(x[: len(z)].mean()))
    return chosen


def _logarithms(items: Sequence[Item], key: str) -> Floats | None:
    """log(1 + a number of each item); None where some has none."""
    values = [item.get(key) for item in items]
    if not all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e300
        for value in values
    ):
        return None
    x = np.array(values, dtype=np.float64)
    # As log(x) for large numbers and for small ones, whatever their unit.
    least = float(x[x > 0].min(initial=1.0))
    found: Floats = np.log(x + (least if (x == 0).any() else 0.0))
    return found
