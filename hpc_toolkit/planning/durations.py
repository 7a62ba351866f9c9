"""Durations of the items left, drawn from the durations of the finished ones.

The logarithm of an item's seconds is a common mean, plus the effects of its kind, of its sibling
groups and its group (or of its part of a list without groups), plus a residual. Each draw gives the
finished items random weights (Bayesian bootstrap), takes these means, and gives every item left the
residual of a finished item. The mean of few items shrinks towards the mean of all, and has noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc_toolkit.queue.affinity import siblings_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpc_toolkit.planning.work import Guess, StageWork
    from hpc_toolkit.queue.items import Item

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Chance = np.random.Generator

_KINDS_SD, _GROUPS_SD, _PARTS_SD = 0.7, 0.15, 0.2
"""How much kinds and sets of sibling groups, sibling groups, and parts of a list are expected to
differ, as standard deviations of a logarithm."""
_FREE = 2
"""Number of classes that this expectation counts for, where the spread of classes is drawn."""
_FAR_SD = 1.0
"""How much items at one end of a list may differ from items at the other end, likewise."""
_LONGER = 0.5
"""How much longer than its age a running item takes that is older than all finished ones: mean of
an exponential logarithm, so twice as long in the mean."""
_SURPRISE, _SURPRISE_SD = 0.5, 1.5
"""Mean weight of kinds of items of which none has ended, in finished items, and how much longer
these take: the absolute value of a normal logarithm. Half of the lists in which 1 of 50 items takes
8 times as long show none of them among the first 35."""
_FARTHEST = 20.0
"""No item is drawn longer than this many times the longest finished item."""
_LEAST_S = 1e-4
_FEWEST = 12
"""Number of items that must have ended before a key of theirs can be found to matter."""
_EACH, _MOST_PARTS = 4, 16
"""Fewest finished items in a part of a list, and the most parts."""
_MOST_KINDS, _BINS = 100, 8
"""Most values of a text key, and the intervals into which the values of a number are divided."""
_GAIN, _MORE_GAIN = 0.7, 0.9
"""Most share of the variance that kinds leave: of all of it, and of what simpler kinds leave."""
_NEWEST = 3
"""The last rounds of a search, which show what it prefers."""
_CHOICE_SD, _FIRST_CHOICE_SD = 0.1, 0.3
"""How much longer the next arms of a search may be than its last ones: standard deviation of a
logarithm after many rounds, and what is added after the first round."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of the durations of a stage."""

    batches: Floats
    """Seconds of each batch once its group is loaded."""
    load_s: Floats
    """Seconds to load the groups of each batch."""
    longest_s: float
    """Seconds of the longest item."""
    items_s: float
    """Sum of the seconds of the items, without failed attempts and without what units add."""
    squares: float
    """Sum of the squared seconds of the items."""


class GuessedDurations:
    keys: tuple[str, ...] = ()

    def __init__(self, stage: StageWork, guess: Guess) -> None:
        self._guess = guess
        self._counts = np.array([batch.count for batch in stage.batches])
        self._loads = np.array([batch.loads for batch in stage.batches])

    def draw(self, chance: Chance, drift: float) -> Draw:
        """Draw each batch as a sum of log-normal items, which is nearly log-normal itself: a list
        may have millions of items.
        """
        guess, counts = self._guess, self._counts
        off = drift * np.exp(chance.normal(0.0, np.log(guess.factor) / 1.645, 2))
        item_s = float(guess.seconds_per_item * off[0])
        variance = math.expm1(guess.spread**2)
        sd = np.sqrt(np.log1p(variance / counts))
        batches = counts * item_s * np.exp(sd * chance.standard_normal(len(sd)) - sd**2 / 2)
        longest_s = float(batches[counts == 1].max(initial=0.0))
        if others := int(counts[counts > 1].sum()):
            below = min(max(chance.random() ** (1 / others), 1e-12), 1 - 1e-12)
            sigmas = NormalDist().inv_cdf(below)
            middle_s = item_s * math.exp(-(guess.spread**2) / 2)
            longest_s = max(longest_s, middle_s * math.exp(guess.spread * sigmas))
        squares = batches**2 * (1.0 + variance * (1.0 - 1.0 / counts)) / counts
        load_s = self._loads * guess.load_s * off[1]
        items_s = float(batches.sum())
        return Draw(batches, load_s, longest_s, items_s, float(np.sum(squares)))


class LearnedDurations:
    """Draws durations by a model of the finished items, of which there must be at least one."""

    def __init__(self, stage: StageWork) -> None:
        self._stage, seen = stage, len(stage.seen)
        self._z = np.log(np.maximum([one.seconds for one in stage.seen], _LEAST_S))
        self._factors, self.keys = _factors(stage, self._z)
        self._size = seen + len(stage.left)
        entries = np.array([one.entry for one in stage.seen])
        self._recent = np.isin(entries, np.unique(entries)[-_NEWEST:])
        running = [one for one in stage.batches if one.is_running]
        self._running = np.array([seen + one.first for one in running], dtype=np.int64)
        self._ages = np.log([max(one.age_s, _LEAST_S) for one in running])
        self._starts = [batch.first for batch in stage.batches]
        overhead_s = np.mean(stage.overheads_s) if stage.overheads_s else 0.0
        self._overhead_s = overhead_s * np.array([batch.units for batch in stage.batches])
        self._load_s = np.array([load.seconds for load in stage.loads])
        self._loads = np.array([batch.loads for batch in stage.batches])
        loading = [one.group for one in stage.loads] + [one.group for one in stage.batches]
        self._siblings, self._families = _numbered([siblings_key(group) for group in loading])

    def draw(self, chance: Chance, drift: float) -> Draw:
        stage, seen = self._stage, len(self._z)
        of, z, weight = np.arange(seen), self._z, chance.exponential(size=seen)
        middle, rest = self._fit(of, z, weight, chance)
        longer = self._longer(middle, rest, weight, chance)
        if len(longer):
            # Long items still run while short ones have ended: fit again, with the running ones.
            of, z = np.append(of, self._running), np.append(z, longer)
            weight = np.append(weight, chance.exponential(size=len(longer)))
            middle, rest = self._fit(of, z, weight, chance)
            longer = self._longer(middle, rest, weight, chance)
        logs = middle[seen:] + self._residuals(rest, weight, chance)
        logs[self._running - seen] = longer
        most = math.log(_FARTHEST) + max(self._z.max(), self._ages.max(initial=-np.inf))
        seconds = drift * np.exp(np.minimum(logs, most))
        if stage.coming and stage.rounds:
            seconds[-stage.coming :] *= self._preference(seconds[-stage.coming :], chance)
        longest_s, items_s, squares = seconds.max(), seconds.sum(), np.sum(seconds**2)
        if stage.retried:
            # A failed item runs again, each time with the failure rate so far.
            rate = chance.beta(stage.retried + 0.5, stage.attempts - stage.retried + 0.5)
            seconds *= chance.geometric(1.0 - min(rate, 0.9), size=len(seconds))
        batches = np.add.reduceat(seconds, self._starts) + drift * self._overhead_s
        load_s = drift * self._loading(chance)
        return Draw(batches, load_s, float(longest_s), float(items_s), float(squares))

    def _fit(self, of: Ints, z: Floats, weight: Floats, chance: Chance) -> tuple[Floats, Floats]:
        """Return the expected logarithm of every item, and the residuals of the items ``of``."""
        mean = float(np.average(z, weights=weight))
        middle, rest = np.full(self._size, mean), z - mean
        for factor in self._factors:
            known, drawn = factor.effects(rest, of, weight, chance)
            middle += drawn[factor.of]
            rest = rest - known[factor.of[of]]
        return middle, rest

    def _residuals(self, rest: Floats, weight: Floats, chance: Chance) -> Floats:
        """Draw a residual for each item left: of a finished item, or of a kind not seen yet."""
        share = np.cumsum(np.append(weight, chance.gamma(_SURPRISE)))
        more = abs(float(chance.normal(0.0, _SURPRISE_SD)))
        drawn = np.searchsorted(share, share[-1] * chance.random(len(self._stage.left)), "right")
        values: Floats = np.append(rest, 0.0)[np.minimum(drawn, len(rest))]
        other = drawn >= len(rest)
        values[other] = more + chance.choice(rest, int(other.sum()))
        return values

    def _longer(self, middle: Floats, rest: Floats, weight: Floats, chance: Chance) -> Floats:
        """Draw the logarithms of running items: all are longer than the items have run so far."""
        logs = np.empty(len(self._running))
        for number, age in enumerate(self._ages - middle[self._running]):
            able = np.flatnonzero(rest > age)
            mass = weight[able].sum()
            if len(able) and chance.random() * (mass + chance.gamma(_SURPRISE)) < mass:
                value = rest[chance.choice(able, p=weight[able] / mass)]
            else:
                value = max(age, rest.max()) + chance.exponential(_LONGER)
            logs[number] = middle[self._running[number]] + value
        return logs

    def _preference(self, seconds: Floats, chance: Chance) -> float:
        """Return a factor for arms to come of a search: it may go on to choose arms as long as its
        last ones, or evenly, or something in between.
        """
        width = _CHOICE_SD + _FIRST_CHOICE_SD / math.sqrt(self._stage.rounds)
        ratio = float(np.exp(self._z[self._recent]).mean() / max(seconds.mean(), 1e-9))
        return float(ratio ** chance.random() * np.exp(chance.normal(0.0, width)))

    def _loading(self, chance: Chance) -> Floats:
        """Return mean seconds to load for each batch: of its sibling groups, else of all groups."""
        count = len(self._load_s)
        weight = chance.exponential(size=count)
        mass = np.bincount(self._siblings[:count], weight, self._families)
        total = np.bincount(self._siblings[:count], weight * self._load_s, self._families)
        mean = total.sum() / max(mass.sum(), 1e-12)
        means = np.where(mass > 0, total / np.maximum(mass, 1e-12), mean)
        found: Floats = means[self._siblings[count:]] * self._loads
        return found


@dataclass(frozen=True, slots=True)
class _Factor:
    """Something that divides the items, finished ones first, into classes of different lengths."""

    of: Ints
    """The class of each item."""
    count: int
    sd: float
    """How much the classes are expected to differ."""
    far: Floats | None = None
    """For each class, standard deviation of what its finished items do not say of its others."""
    repeats: tuple[Ints, Ints] | None = None
    """Classes of first items after a load, and classes of their repeats, pair by pair."""

    def effects(
        self, rest: Floats, items: Ints, weight: Floats, chance: Chance
    ) -> tuple[Floats, Floats]:
        """Return the mean of each class, shrunk towards 0 as far as chance may explain it, and a
        draw from what it may truly be. Classes without a finished item differ like the others.
        """
        of = self.of[items]
        mass = np.bincount(of, weight, self.count)
        number = np.bincount(of, minlength=self.count)
        means = np.bincount(of, weight * rest, self.count) / np.maximum(mass, 1e-12)
        seen = number > 0
        known = int(seen.sum())
        within = float(np.average((rest - means[of]) ** 2, weights=weight))
        within *= len(of) / max(len(of) - known, 1)
        noise = within / np.maximum(number, 1)
        between = float(np.sum(means[seen] ** 2 - noise[seen])) if known > 1 else 0.0
        # How much classes differ is uncertain itself, the more so the fewer were seen.
        variance = (max(between, 0.0) + self.sd**2) / known
        variance *= (known + _FREE) / chance.chisquare(known + _FREE)
        belief = variance / (variance + noise)
        mean = np.where(seen, means * belief, 0.0)
        # The seen classes may happen to be short, and then all others are longer together.
        shift = chance.normal(0.0, math.sqrt(variance / known))
        sd = np.where(seen, np.sqrt(noise * belief), math.sqrt(variance))
        if self.far is not None:
            sd = np.hypot(sd, self.far)
        drawn = mean + np.where(seen, 0.0, shift) + chance.normal(0.0, 1.0, self.count) * sd
        if self.repeats is not None:
            self._draw_repeats(drawn, seen, chance)
        return mean, drawn

    def _draw_repeats(self, drawn: Floats, seen: Flags, chance: Chance) -> None:
        """Draw unseen repeats from their firsts: like other repeats, else any share of these."""
        assert self.repeats is not None
        first, again = self.repeats
        both = seen[first] & seen[again]
        less = -chance.exponential()
        if both.any():
            less = float(np.mean(drawn[again[both]] - drawn[first[both]]))
        new = seen[first] & ~seen[again]
        noise = chance.normal(0.0, _KINDS_SD * bool(both.any()), int(new.sum()))
        drawn[again[new]] = drawn[first[new]] + less + noise


def _factors(stage: StageWork, z: Floats) -> tuple[list[_Factor], tuple[str, ...]]:
    """Return what the lengths of items follow, and the keys of items among that.

    ``z`` is the logarithm of the seconds of each finished item.
    """
    items = [*(one.item for one in stage.seen), *stage.left]
    kinds, keys = _kinds(stage, items, z)
    found = [kinds] if kinds is not None else []
    if stage.group_by is not None:
        names = [*(one.group for one in stage.seen), *map(stage.group_of, stage.left)]
        of, count = _numbered(names)
        family, families = _numbered([siblings_key(name) for name in names])
        # Sets of siblings differ more than their groups do, where there are both.
        found += [_Factor(family, families, _KINDS_SD)] if families > 1 else []
        sd = _GROUPS_SD if families < count and families > 1 else _KINDS_SD
        found += [_Factor(of, count, sd)] if families < count else []
    elif (parts := _parts(stage)) is not None:
        found.append(parts)
    return found, keys


def _numbered(values: Sequence[object]) -> tuple[Ints, int]:
    """Return a number from 0 for each value, equal for equal values, and how many there are."""
    number = {value: n for n, value in enumerate(dict.fromkeys(values))}
    return np.array([number[value] for value in values], dtype=np.int64), len(number)


def _parts(stage: StageWork) -> _Factor | None:
    """Divide a list without groups into parts with a few finished items each; None if the place of
    any item is not known. Items may take longer towards the end of a list.
    """
    places = [one.place for one in stage.seen]
    for one in stage.batches:
        places += [None] if one.place is None else range(one.place, one.place + one.count)
    if None in places:
        return None
    at, number = np.array(places, dtype=np.int64), len(stage.seen)
    seen = np.sort(at[:number])
    each = max(_EACH, math.ceil(len(seen) / _MOST_PARTS))
    ends = np.arange(each, len(seen) - each + 1, each)
    cuts = (seen[ends - 1] + seen[ends] + 1) // 2
    of, count = np.searchsorted(cuts, at, side="right"), len(cuts) + 1
    known = np.bincount(of[:number], at[:number], count) / np.bincount(of[:number])
    middle = np.bincount(of, at, count) / np.bincount(of)
    far = _FAR_SD * np.abs(middle - known) / (at.max() + 1)
    return _Factor(of, count, _PARTS_SD, far=far)


def _kinds(
    stage: StageWork, items: Sequence[Item], z: Floats
) -> tuple[_Factor | None, tuple[str, ...]]:
    """Return the kinds of items that explain most of the differences between finished items.

    Items are of one kind if a key has the same value in them. In a group, the first item of a kind
    may do work that its repeats reuse: it is then a kind of its own.
    """
    values = {"": np.zeros(len(items), dtype=np.int64)}
    for key in sorted(items[0].keys() - {stage.group_by}):
        if (of := _values(items, key, len(z))) is not None:
            values[key] = of
    texts = ["", *(key for key in values if isinstance(items[0].get(key), str))]
    firsts = {key: _firsts(stage, values[key]) for key in texts}
    chosen, is_split = "", False
    if len(z) >= _FEWEST:
        most = _GAIN * _unexplained(z, values[""])
        for key, split in [*((key, False) for key in values), *((key, True) for key in firsts)]:
            left = _unexplained(z, 2 * values[key] + (firsts[key] if split else 0))
            if left < most:
                most, chosen, is_split = _MORE_GAIN * left, key, split
    keys = (chosen,) if chosen else ()
    hidden = [key for key in texts[1:] if _is_hidden(values[key], firsts[key], len(z))]
    if not is_split and hidden and stage.group_by is not None:
        chosen, is_split = hidden[0], True
    count = int(values[chosen].max()) + 1
    if not is_split:
        return (_Factor(values[chosen], count, _KINDS_SD) if count > 1 else None), keys
    pairs = 2 * np.arange(count) + 1, 2 * np.arange(count)
    of = 2 * values[chosen] + firsts[chosen]
    return _Factor(of, 2 * count, _KINDS_SD, repeats=pairs), keys


def _is_hidden(kinds: Ints, first: Ints, seen: int) -> bool:
    """Return whether repeats of these kinds are left, but too few have ended to know them."""
    known = np.unique(kinds[:seen][first[:seen] == 0])
    return bool((first[seen:] == 0).any()) and 2 * len(known) < len(np.unique(kinds))


def _values(items: Sequence[Item], key: str, seen: int) -> Ints | None:
    """Return the kind of each item by its text or number under a key; None if it tells nothing."""
    values: list[Any] = [item.get(key) for item in items]
    if all(isinstance(value, str) for value in values):
        of, count = _numbered(values)
        return of if 1 < count <= min(_MOST_KINDS, seen // 3) else None
    if not all(type(value) in (int, float) and abs(value) < 1e300 for value in values):
        return None
    x = np.array(values, dtype=np.float64)
    if len(np.unique(x)) == len(x) and float(np.ptp(x)) < 1.2 * len(x):
        return None  # a counter or a seed says nothing about the work
    edges = np.unique(np.quantile(x, np.arange(1, _BINS) / _BINS))
    of, count = _numbered(np.searchsorted(edges, x, side="right").tolist())
    return of if count > 1 else None


def _unexplained(z: Floats, of: Ints) -> float:
    """Return the variance of the finished items that their kinds do not explain."""
    of = of[: len(z)]
    count = np.bincount(of)
    means = np.bincount(of, z) / np.maximum(count, 1)
    free = max(len(z) - int((count > 0).sum()), 1)
    return float(np.sum((z - means[of]) ** 2)) / free


def _firsts(stage: StageWork, kinds: Ints) -> Ints:
    """Return 1 for each item that is the first of its kind since its group was loaded.

    A waiting item is a repeat if a living worker has done its kind since it loaded the group.
    """
    seen, found = len(stage.seen), np.zeros_like(kinds)
    had: set[tuple[object, ...]] = set()
    for number, (one, kind) in enumerate(zip(stage.seen, kinds.tolist(), strict=False)):
        mark = (one.worker, one.load, one.group, kind)
        found[number] = mark not in had
        had.add(mark)
    last = {one.worker: one.load for one in stage.seen}
    living = {(batch.holder, last.get(batch.holder)) for batch in stage.batches if batch.holder}
    had = {(0, *mark[2:]) for mark in had if mark[:2] in living}
    for batch in stage.batches:
        loads = batch.round if stage.group_by else 0  # a worker loads again in another round
        for item in range(batch.first, batch.first + batch.count):
            key = (loads, stage.group_of(stage.left[item]), int(kinds[seen + item]))
            found[seen + item] = key not in had
            had.add(key)
    return found
